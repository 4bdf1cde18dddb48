# Packages by CPack, in the build folder: `cpack -G TGZ` makes one archive of all, `cpack -G DEB` packages as Debian parts them: libmha0, the
# shared library; libmha-dev, what compiling against it needs; mha, the command.
set(CPACK_PACKAGE_NAME mha)
set(CPACK_PACKAGE_VENDOR "the mha authors")
# For packages that are handed on: who answers for them.
set(CPACK_PACKAGE_CONTACT "the mha authors" CACHE STRING "Maintainer of the packages: Name <address>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "multi-head attention for CPUs")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGE_FILE_NAME mha-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_PACKAGE_CHECKSUM SHA256)
set(CPACK_STRIP_FILES ON)
set(CPACK_GENERATOR TGZ)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  list(APPEND CPACK_GENERATOR DEB)
endif()

# A package for each component that the build has. Their descriptions begin with the summary; an empty line parts paragraphs.
set(description "One call takes the input rows of an attention layer to its output
rows. It allocates nothing, starts no thread, and gives the same bits
for any batch, number of threads and instruction set.
")
set(CPACK_COMPONENTS_ALL development)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # by dpkg-shlibdeps, of dpkg-dev
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libmha-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "${description}
This package has the header, the libraries to link, and files for CMake
and pkg-config.")
if(MHA_OPENBLAS)
  list(APPEND suggests libopenblas-dev)
endif()
if(MHA_PTHREADPOOL)
  list(APPEND suggests libpthreadpool-dev)
endif()
list(JOIN suggests ", " CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS)
if(MHA_SHARED)
  list(APPEND CPACK_COMPONENTS_ALL library)
  set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libmha0)
  set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
  set(CPACK_DEBIAN_LIBRARY_DESCRIPTION "${description}
This package has the shared library.")
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libmha0 (= ${PROJECT_VERSION})")
  file(WRITE ${PROJECT_BINARY_DIR}/package/triggers "activate-noawait ldconfig\n")
  set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/package/triggers)
endif()
if(MHA_TOOLS)
  list(APPEND CPACK_COMPONENTS_ALL command)
  set(CPACK_DEBIAN_COMMAND_PACKAGE_NAME mha)
  set(CPACK_DEBIAN_COMMAND_PACKAGE_SECTION science)
  set(CPACK_DEBIAN_COMMAND_DESCRIPTION "${description}
This package has the command, which runs layers on files, packs their
weights and takes them apart.")
endif()

# The names that Debian asks for, in its packages alone.
find_program(MHA_GZIP NAMES gzip DOC "gzip, for the packages for Debian")
mark_as_advanced(MHA_GZIP)
if(MHA_GZIP)
  configure_file(${PROJECT_SOURCE_DIR}/CHANGELOG.md ${PROJECT_BINARY_DIR}/package/changelog COPYONLY)
  execute_process(COMMAND ${MHA_GZIP} -9nf ${PROJECT_BINARY_DIR}/package/changelog)
endif()
foreach(pair library=libmha0 development=libmha-dev command=mha)
  string(REGEX MATCH "(.*)=(.*)" pair ${pair})
  if(CMAKE_MATCH_1 IN_LIST CPACK_COMPONENTS_ALL)
    install(FILES LICENSE DESTINATION share/doc/${CMAKE_MATCH_2} RENAME copyright COMPONENT ${CMAKE_MATCH_1} EXCLUDE_FROM_ALL)
    if(MHA_GZIP)
      install(FILES ${PROJECT_BINARY_DIR}/package/changelog.gz DESTINATION share/doc/${CMAKE_MATCH_2} COMPONENT ${CMAKE_MATCH_1} EXCLUDE_FROM_ALL)
    endif()
  endif()
endforeach()
install(DIRECTORY ${pages_dir}/ DESTINATION share/doc/libmha-dev COMPONENT development EXCLUDE_FROM_ALL)

set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_CURRENT_LIST_DIR}/package_needs.cmake)
include(CPack)
