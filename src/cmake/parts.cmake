# The parts of mha besides the library: each is ON, OFF, or AUTO, which builds it where all that it
# needs is found and says so where it is not. As a part of another project, and cross-compiled, AUTO
# is OFF.  mha_part(PART WHAT NEEDS PACKAGES [STATIC]) leaves ON or OFF in MHA_PART. The macro
# mha_find_PART sets found where all that it needs is there. STATIC: it is linked with the static
# library.
function(mha_part part what needs packages)
  set(MHA_${part} AUTO CACHE STRING "Build ${what}: ON, OFF, or AUTO (where ${needs} is found)")
  set_property(CACHE MHA_${part} PROPERTY STRINGS AUTO ON OFF)
  set(wanted ${MHA_${part}})
  set(MHA_${part} OFF PARENT_SCOPE)  # until all is found
  if(wanted STREQUAL "AUTO" AND (CMAKE_CROSSCOMPILING OR NOT PROJECT_IS_TOP_LEVEL))
    set(wanted OFF)
  endif()
  if(NOT wanted)
    return()
  endif()

  if("STATIC" IN_LIST ARGN AND NOT MHA_STATIC)
    if(NOT wanted STREQUAL "AUTO")
      message(FATAL_ERROR
        "MHA_${part}=${wanted}: ${what} needs MHA_STATIC=ON. Set that, or MHA_${part}=OFF.")
    endif()
    message(STATUS "mha: without ${what}, for want of MHA_STATIC=ON")
    return()
  endif()
  set(found OFF)
  cmake_language(CALL mha_find_${part})
  if(found)
    set(MHA_${part} ON PARENT_SCOPE)
  elseif(wanted STREQUAL "AUTO")
    message(STATUS "mha: without ${what}, for want of ${needs} (Debian: ${packages})")
  else()
    message(FATAL_ERROR
      "MHA_${part}=${wanted}: ${what} needs ${needs}, which was not found (Debian: apt-get install "
      "${packages}). "
      "Install it, or configure with -DMHA_${part}=OFF; the rest of mha does not need it.")
  endif()
endfunction()

# Imported targets are seen by the folder that looks for them and those below it.
macro(mha_find_OPENBLAS)
  include(${PROJECT_SOURCE_DIR}/src/cmake/find_openblas.cmake)
  find_path(MHA_OPENBLAS_INCLUDE_DIR NAMES cblas.h HINTS ${MHA_OPENBLAS_PC_INCLUDE_DIRS}
    PATH_SUFFIXES openblas
    DOC "Where OpenBLAS has cblas.h")
  mark_as_advanced(MHA_OPENBLAS_INCLUDE_DIR)
  if(TARGET mha::openblas_library AND MHA_OPENBLAS_INCLUDE_DIR)
    set(found ON)
  endif()
endmacro()

macro(mha_find_PTHREADPOOL)
  include(${PROJECT_SOURCE_DIR}/src/cmake/find_pthreadpool.cmake)
  if(TARGET mha::pthreadpool_library)
    set(found ON)
  endif()
endmacro()

# The headers are those of Debian 13's package; tools/adapters/onnx/headers.sh puts them where it is
# the second place. The operators are linked by options of Linux's linkers.
macro(mha_find_ONNX)
  find_path(MHA_ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h PATHS
    ${PROJECT_SOURCE_DIR}/build/onnxruntime/include PATH_SUFFIXES onnxruntime
    DOC "Where ONNX Runtime's headers are")
  mark_as_advanced(MHA_ONNXRUNTIME_INCLUDE_DIR)
  if(MHA_ONNXRUNTIME_INCLUDE_DIR AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(found ON)
  endif()
endmacro()

# The module's functions of ggml are found in the program that loads it, which is the rule of
# Linux's linkers.
macro(mha_find_GGML)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(found ON)
  endif()
endmacro()

macro(mha_find_BENCH)
  find_package(benchmark QUIET)
  if(benchmark_FOUND)
    set(found ON)
  endif()
endmacro()

# GoogleTest is compiled from Debian's sources with the flags of the build, so that the tests also
# cross-compile and run under sanitizers.
macro(mha_find_TESTS)
  find_path(MHA_GOOGLETEST_SOURCE_DIR NAMES googletest/src/gtest-all.cc PATHS /usr/src/googletest
    NO_CMAKE_FIND_ROOT_PATH
    DOC "Where the sources of GoogleTest are")
  mark_as_advanced(MHA_GOOGLETEST_SOURCE_DIR)
  if(NOT MHA_GOOGLETEST_SOURCE_DIR)
    find_package(GTest QUIET)
  endif()
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_FOUND AND (MHA_GOOGLETEST_SOURCE_DIR OR GTest_FOUND))
    set(found ON)
  endif()
endmacro()
