# Cross-compiles for WebAssembly with zig's clang, which tools/bindings/wasm/setup.sh installs into
# build/wasm; the tests run under Node.
set(CMAKE_SYSTEM_NAME Generic)  # of which CMake expects nothing
set(CMAKE_SYSTEM_PROCESSOR wasm32)
list(APPEND CMAKE_SYSTEM_PREFIX_PATH /usr)  # xsimd's headers, GoogleTest's source
get_filename_component(wasm ${CMAKE_CURRENT_LIST_DIR}/../../build/wasm/bin ABSOLUTE)
set(CMAKE_C_COMPILER ${wasm}/wasm-cc)
set(CMAKE_CXX_COMPILER ${wasm}/wasm-c++)
set(CMAKE_AR ${wasm}/wasm-ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${wasm}/wasm-ranlib CACHE FILEPATH "")
set(CMAKE_C_FLAGS_INIT -fno-sanitize=undefined)  # zig's default without optimisation
set(CMAKE_CXX_FLAGS_INIT -fno-sanitize=undefined)
set(CMAKE_CROSSCOMPILING_EMULATOR
  "${wasm}/node;--no-warnings;${CMAKE_CURRENT_LIST_DIR}/wasi.mjs")
