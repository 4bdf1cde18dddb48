// Runs a program for WASI under Node: node wasi.mjs PROGRAM ARGUMENT...
import { readFile } from 'node:fs/promises';
import { argv, env, exit } from 'node:process';
import { WASI } from 'node:wasi';

const args = argv.slice(2);
const wasi = new WASI({ version: 'preview1', args, env, preopens: { '/': '/' } });
const module = await WebAssembly.compile(await readFile(args[0]));
exit(wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject())));
