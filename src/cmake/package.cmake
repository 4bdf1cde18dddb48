# An archive of the library and, where it is built, the command, by `cpack` in the build folder.
# Debian's packages: tools/release/debian.sh.
set(CPACK_PACKAGE_NAME mha)
set(CPACK_PACKAGE_VENDOR "the mha authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "multi-head attention for CPUs")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGE_FILE_NAME mha-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_PACKAGE_CHECKSUM SHA256)
set(CPACK_STRIP_FILES ON)
set(CPACK_GENERATOR TGZ)
include(CPack)
