# Counts which lines and branches of the library and the operators for ONNX Runtime run
# (tools/coverage.sh): not those of the kernels, which src/kernels has, nor of the tests. Read by
# -DCMAKE_PROJECT_mha_INCLUDE, and carried out when all targets are known.
function(mha_count_coverage)
  foreach(target mha_core mha_openblas mha_pthreadpool mha_onnx)
    if(TARGET ${target})
      target_compile_options(${target} PRIVATE -O0 --coverage -fprofile-update=atomic)
    endif()
  endforeach()
  target_link_options(mha_static INTERFACE --coverage)
  target_link_options(mha_shared PRIVATE --coverage)
  target_link_options(mha_shared INTERFACE --coverage)
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL mha_count_coverage)
