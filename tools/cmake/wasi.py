"""Runs a program for WASI under wasmtime: wasi.py default|deterministic PROGRAM ARGUMENT..."""

import sys

try:
    from wasmtime import Config, Engine, ExitTrap, Linker, Module, Store, WasiConfig
except ImportError:
    print("wasmtime is not installed; tools/bindings/wasm/setup.sh installs it")
    sys.exit(3)

config, wasi = Config(), WasiConfig()
config.wasm_relaxed_simd_deterministic = sys.argv[1] == "deterministic"
wasi.argv = sys.argv[2:]
wasi.inherit_stdout()
wasi.inherit_stderr()
store = Store(Engine(config))
store.set_wasi(wasi)
linker = Linker(store.engine)
linker.define_wasi()
module = Module.from_file(store.engine, sys.argv[2])
try:
    linker.instantiate(store, module).exports(store)["_start"](store)
except ExitTrap as end:
    sys.exit(end.code)
