# Finds OpenBLAS and defines the target mha::openblas_library over it, or leaves it undefined. Used
# by the build of mha::openblas, and by those who link the installed one.
if(NOT TARGET mha::openblas_library)
  find_package(PkgConfig QUIET)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(MHA_OPENBLAS_PC QUIET openblas)
  endif()
  find_library(MHA_OPENBLAS_LIBRARY NAMES openblas HINTS ${MHA_OPENBLAS_PC_LIBRARY_DIRS} DOC
    "The library of OpenBLAS")
  mark_as_advanced(MHA_OPENBLAS_LIBRARY)
  if(MHA_OPENBLAS_LIBRARY)
    add_library(mha::openblas_library UNKNOWN IMPORTED)
    set_target_properties(mha::openblas_library PROPERTIES IMPORTED_LOCATION
      "${MHA_OPENBLAS_LIBRARY}")
  endif()
endif()
