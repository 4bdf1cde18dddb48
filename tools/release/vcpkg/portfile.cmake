vcpkg_download_distfile(archive URLS "@URL@" FILENAME "mha-${VERSION}.tar.gz" SHA512 @SHA512@)
vcpkg_extract_source_archive(source ARCHIVE "${archive}")
string(COMPARE EQUAL "${VCPKG_LIBRARY_LINKAGE}" "static" static)
string(COMPARE EQUAL "${VCPKG_LIBRARY_LINKAGE}" "dynamic" shared)
vcpkg_cmake_configure(SOURCE_PATH "${source}" OPTIONS -DMHA_STATIC=${static} -DMHA_SHARED=${shared}
  -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF
  -DMHA_ONNX=OFF -DMHA_GGML=OFF -DMHA_TOOLS=OFF -DMHA_BENCH=OFF -DMHA_TESTS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/mha)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${source}/LICENSE")
