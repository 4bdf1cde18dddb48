# What the installed libraries are made of, as SPDX 2.3 in JSON: ${file}. Run when something is
# installed or packaged, with the sources as they are then. ${source}, ${version}, ${xsimd} (its
# folder) and ${parts} (what of openblas, pthreadpool and command is built) come from install.cmake.
cmake_minimum_required(VERSION 3.22)
file(GLOB_RECURSE paths LIST_DIRECTORIES OFF ${source}/include/*.h ${source}/src/*.cpp
  ${source}/src/*.c ${source}/src/*.h)
list(SORT paths)
set(sums)
set(ids)
set(files)
foreach(path IN LISTS paths)
  file(SHA1 ${path} sha1)
  file(SHA256 ${path} sha256)
  file(RELATIVE_PATH name ${source} ${path})
  string(REGEX REPLACE "[^a-zA-Z0-9]" "-" id SPDXRef-${name})
  list(APPEND sums ${sha1})
  list(APPEND ids "\"${id}\"")
  list(APPEND files "{\"SPDXID\": \"${id}\", \"fileName\": \"./${name}\",
     \"licenseConcluded\": \"MIT\", \"copyrightText\": \"NOASSERTION\",
     \"checksums\": [{\"algorithm\": \"SHA1\", \"checksumValue\": \"${sha1}\"},
     {\"algorithm\": \"SHA256\", \"checksumValue\": \"${sha256}\"}]}")
endforeach()
list(SORT sums)
list(JOIN sums "" sums)
string(SHA1 code "${sums}")
list(JOIN ids ", " ids)

set(packages)
set(relations)
macro(package name version licence place more)
  list(APPEND packages "{\"SPDXID\": \"SPDXRef-${name}\", \"name\": \"${name}\",
     \"versionInfo\": \"${version}\", \"downloadLocation\": \"${place}\",
     \"licenseConcluded\": \"${licence}\", \"licenseDeclared\": \"${licence}\",
     \"copyrightText\": \"NOASSERTION\", ${more}}")
endmacro()
macro(relation of kind to)
  list(APPEND relations
    "{\"spdxElementId\": \"SPDXRef-${of}\", \"relationshipType\": \"${kind}\", \
\"relatedSpdxElement\": \"SPDXRef-${to}\"}")
endmacro()
set(alone "\"filesAnalyzed\": false")
package(mha ${version} MIT NOASSERTION "\"filesAnalyzed\": true, \"hasFiles\": [${ids}],
     \"packageVerificationCode\": {\"packageVerificationCodeValue\": \"${code}\"}")
relation(DOCUMENT DESCRIBES mha)
file(STRINGS ${xsimd}/xsimd/config/xsimd_config.hpp lines REGEX
  "define XSIMD_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
list(JOIN numbers "." numbers)
package(xsimd ${numbers} BSD-3-Clause https://github.com/xtensor-stack/xsimd
  "${alone}, \"comment\": \"headers, compiled into the kernels\"")
relation(mha STATIC_LINK xsimd)
if("openblas" IN_LIST parts)
  package(OpenBLAS NOASSERTION BSD-3-Clause https://github.com/OpenMathLib/OpenBLAS
    "${alone}, \"comment\": \"of programs that link mha::openblas\"")
  relation(OpenBLAS OPTIONAL_DEPENDENCY_OF mha)
endif()
if("pthreadpool" IN_LIST parts)
  package(pthreadpool NOASSERTION BSD-2-Clause https://github.com/Maratyszcza/pthreadpool
    "${alone}, \"comment\": \"of programs that link mha::pthreadpool\"")
  relation(pthreadpool OPTIONAL_DEPENDENCY_OF mha)
endif()

foreach(list files packages relations)
  list(JOIN ${list} ",\n    " ${list})
endforeach()
string(TIMESTAMP now "%Y-%m-%dT%H:%M:%SZ" UTC)  # SOURCE_DATE_EPOCH, where that is set
file(REMOVE ${file})  # which may be root's
file(WRITE ${file} "{
  \"spdxVersion\": \"SPDX-2.3\", \"dataLicense\": \"CC0-1.0\", \"SPDXID\": \"SPDXRef-DOCUMENT\",
    \"name\": \"mha-${version}\",
  \"documentNamespace\": \"https://spdx.org/spdxdocs/mha-${version}-${code}\",
  \"creationInfo\": {\"created\": \"${now}\", \"creators\": [\"Tool: mha-sbom-${version}\"]},
  \"packages\": [
    ${packages}],
  \"files\": [
    ${files}],
  \"relationships\": [
    ${relations}]
}
")
