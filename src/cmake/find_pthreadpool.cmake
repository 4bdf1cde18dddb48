# Finds the library pthreadpool and defines the target mha::pthreadpool_library over it, or leaves
# it undefined. Used by the build of mha::pthreadpool, and by those who link the installed one.
# pthreadpool has no package file; a build of which it is a part gives its target the alias
# mha::pthreadpool_library, and nothing is looked for.
if(NOT TARGET mha::pthreadpool_library)
  find_path(MHA_PTHREADPOOL_INCLUDE_DIR NAMES pthreadpool.h DOC
    "Where pthreadpool has pthreadpool.h")
  find_library(MHA_PTHREADPOOL_LIBRARY NAMES pthreadpool DOC "The library pthreadpool")
  mark_as_advanced(MHA_PTHREADPOOL_INCLUDE_DIR MHA_PTHREADPOOL_LIBRARY)
  if(MHA_PTHREADPOOL_INCLUDE_DIR AND MHA_PTHREADPOOL_LIBRARY)
    add_library(mha::pthreadpool_library UNKNOWN IMPORTED)
    set_target_properties(mha::pthreadpool_library PROPERTIES
      IMPORTED_LOCATION "${MHA_PTHREADPOOL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES
        "${MHA_PTHREADPOOL_INCLUDE_DIR}")
  endif()
endif()
