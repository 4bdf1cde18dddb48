# What ctest reads behind the tests of each program (tests/CMakeLists.txt: mha_test).

# label_tests(TESTS LABEL REGEX): one more label for those whose names match.
function(label_tests tests label regex)
  foreach(test IN LISTS tests)
    if(test MATCHES "${regex}")
      set(labels_of_${test} ${labels_of_${test}} ${label} PARENT_SCOPE)
      set_tests_properties(${test} PROPERTIES LABELS "${labels_of_${test}};${label}")
    endif()
  endforeach()
endfunction()
