# What cpack reads before it makes each kind of package. Without dpkg-shlibdeps it would leave out silently what the packages depend on.
if(CPACK_GENERATOR STREQUAL "DEB")
  find_program(dpkg_shlibdeps dpkg-shlibdeps)
  find_program(file file)
  if(NOT dpkg_shlibdeps OR NOT file)
    message(FATAL_ERROR "Making packages for Debian needs dpkg-shlibdeps and file, of which one was not found (Debian: apt-get install "
      "dpkg-dev file). Install them, or make the archive alone: cpack -G TGZ.")
  endif()
endif()
