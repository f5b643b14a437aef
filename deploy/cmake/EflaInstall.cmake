# `cmake --install BUILD --prefix DIR` makes a relocatable folder: programs in bin/, the CUDA module and every
# library that a bare Debian or Ubuntu with glibc alone lacks in lib/, tests in bin/ too when they were built.
# The folder runs from anywhere; cuBLAS is taken from the machine (/usr/local/cuda/lib64 or LD_LIBRARY_PATH).

set(bundle_programs)
foreach(target efla_server efla efla_checkpoint efla_bench session_bench device_bench drift_bench kernels_bench)
  if(TARGET ${target})
    list(APPEND bundle_programs ${target})
    # RPATH in place of RUNPATH: lib/ is also where the libraries look for what they need themselves (libedit for libbsd).
    target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
  endif()
endforeach()
get_property(bundle_tests GLOBAL PROPERTY EFLA_TEST_PROGRAMS)
list(APPEND bundle_programs ${bundle_tests})

set_target_properties(${bundle_programs} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
install(TARGETS ${bundle_programs} RUNTIME_DEPENDENCY_SET bundle_libraries RUNTIME DESTINATION bin)
install(RUNTIME_DEPENDENCY_SET bundle_libraries
  PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|rt|dl|pthread|resolv)\\.so" "^lib(cublas|cublasLt|cuda|cudart)\\.so"
  POST_EXCLUDE_REGEXES "/ld-linux.*" "/lib(c|m|rt|dl|pthread|resolv)\\.so.*"
  LIBRARY DESTINATION lib)
if(TARGET efla_cuda)
  install(TARGETS efla_cuda LIBRARY DESTINATION lib)
endif()
install(DIRECTORY model/demo DESTINATION share/efla)
install(FILES README.md LICENSE CHANGELOG.md DESTINATION share/efla)
