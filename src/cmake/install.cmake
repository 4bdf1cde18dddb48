# What `cmake --install` copies: headers, libraries, the CMake package, the pkg-config files, the
# license and the pages. Nothing of it names its own place, so that the installed tree can be moved.
# The components are library and development, as Debian parts packages, and man and pages, which
# Debian's packages have in other places: package.cmake.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mha)
set(generated_dir ${PROJECT_BINARY_DIR}/package)

include(src/cmake/pages.cmake)
# The list of what is in the libraries, mha.spdx.json, is one of the pages.
set(parts)
foreach(part openblas pthreadpool)
  if(TARGET mha_${part})
    list(APPEND parts ${part})
  endif()
endforeach()
install(CODE "set(file [[${pages_dir}/mha.spdx.json]])
set(source [[${PROJECT_SOURCE_DIR}]])
set(version ${PROJECT_VERSION})
set(xsimd [[${MHA_XSIMD_INCLUDE_DIR}]])
set(parts ${parts})
include([[${PROJECT_SOURCE_DIR}/src/cmake/sbom.cmake]])" ALL_COMPONENTS)
install(DIRECTORY ${pages_dir}/ DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT pages)
# Not in every copy of the sources.
install(FILES LICENSE src/cmake/NOTICES.txt CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR}
  COMPONENT pages OPTIONAL)

install(FILES include/mha.h include/mha_options.h include/mha_tables.h include/mha_extra.h
  include/mha_recurrent.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
foreach(library mha_static mha_shared)
  if(TARGET ${library})
    install(TARGETS ${library} EXPORT mhaTargets
      ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
      LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development
      RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT library)
  endif()
endforeach()
install(EXPORT mhaTargets NAMESPACE mha:: DESTINATION ${package_dir} COMPONENT development)

configure_package_config_file(src/cmake/mhaConfig.cmake.in ${generated_dir}/mhaConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${generated_dir}/mhaConfigVersion.cmake COMPATIBILITY
  SameMajorVersion)
install(FILES ${generated_dir}/mhaConfig.cmake ${generated_dir}/mhaConfigVersion.cmake DESTINATION
  ${package_dir} COMPONENT development)

file(RELATIVE_PATH libdir_from_prefix ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH includedir_from_prefix ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
file(RELATIVE_PATH prefix_from_pkgconfig ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
  ${CMAKE_INSTALL_PREFIX})
configure_file(src/cmake/mha.pc.in ${generated_dir}/mha.pc @ONLY)
install(FILES ${generated_dir}/mha.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT
  development)

# Optional targets, each a component of the package: to find it needs what its find_NAME.cmake
# finds.
foreach(component openblas pthreadpool)
  if(TARGET mha_${component})
    install(FILES include/mha_${component}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT
      development)
    install(TARGETS mha_${component} EXPORT mha_${component}Targets ARCHIVE DESTINATION
      ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
    install(EXPORT mha_${component}Targets NAMESPACE mha:: DESTINATION ${package_dir} COMPONENT
      development)
    install(FILES src/cmake/find_${component}.cmake DESTINATION ${package_dir} COMPONENT
      development)
    configure_file(src/cmake/mha_${component}.pc.in ${generated_dir}/mha_${component}.pc @ONLY)
    install(FILES ${generated_dir}/mha_${component}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
      COMPONENT development)
  endif()
endforeach()
