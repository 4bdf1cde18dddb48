// The npm package mha-wasm as it is installed: wasm_test.py packs it, and writes cases.json.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import test from 'node:test';
import { chromium, posted } from './wasm_browser.mjs';

const folder = fs.realpathSync(`${import.meta.dirname}/../../build/wasm`), work = `${folder}/test`;
const project = `${work}/installed`, installed = `${project}/node_modules/mha-wasm`;
const run = (file, ...words) => String(execFileSync(file, words, { cwd: project, stdio: 'pipe' }));
// The tarball, in a folder that has nothing else.
fs.rmSync(project, { recursive: true, force: true });
fs.mkdirSync(project);
fs.writeFileSync(`${project}/package.json`, '{"type": "module"}');
const packed = fs.readdirSync(folder).find((name) => name.endsWith('.tgz'));
run('npm', 'install', '--silent', '--offline', '--no-audit', `${folder}/${packed}`);
const { load, MhaError } = await import(`${installed}/mha.js`);

const mha = await load();
const fill = (n) => Float32Array.from({ length: n }, (_, i) => (((i * 7) % 11) - 5) / 8);
const small = { queryDim: 8, numHeads: 2, wQkv: fill(192), wO: fill(64) };

// As the native library computes them: into new arrays, blocks and given arrays.
const revived = (_, value) => {
  const [type] = Object.keys(value ?? {});
  return /^[A-Z]\w+Array$/.test(type) ? globalThis[type].from(value[type]) : value;
};
const cases = Object.entries(JSON.parse(fs.readFileSync(`${work}/cases.json`), revived));
for (const [title, steps] of cases)
  for (const into of ['new', 'block', 'given']) test(`${title}, ${into}`, () => {
    const made = { mha };
    for (const { on, method, options, expected, name } of steps) {
      const given = options.cache ? { ...options, cache: made.cache } : { ...options };
      const length = expected.output?.length;
      const block = length && into === 'block' ? mha.alloc(Float32Array, length) : undefined;
      block?.view.fill(NaN);
      if (length && into !== 'new') given.output = block ?? new Float32Array(length);
      const result = made[on][method](...(Array.isArray(options) ? options : [given]));
      if (name) made[name] = result;
      if (given.output) assert.equal(result.output, given.output);
      for (const [output, bits] of Object.entries(expected))
        assert.deepEqual(result[output].view ?? result[output], bits, output);
      block?.dispose();
    }
  });

const layer = mha.layer(small), x = fill(32);
const refuses = (call, message, status) =>
  assert.throws(call, status ? { message, status } : { message });

test('unknown options and what the library refuses have messages', () => {
  refuses(() => layer.forward({ query: x, casual: true }), /no option casual; .* causal\?/);
  refuses(() => layer.forward({ query: x, score: { softCap: 1 } }), /do you mean softcap/);
  refuses(() => mha.layer({ ...small, format: { type: 'int9' } }), /type is "int9".*'int8'/);
  refuses(() => mha.layer({ ...small, structSize: 1 }), /no option structSize/);
  refuses(() => mha.layer({ ...small, numHeads: 3 }), /num_heads is 3, w/, 'MHA_ERROR_SHAPE');
  assert.throws(() => mha.layerView(layer.save().fill(1, 5000, 5001)), MhaError);
  refuses(() => mha.layerView(new Uint8Array(10)), /./, 'MHA_ERROR_PACKED_FORMAT');
  refuses(() => layer.forward({ query: x, windowLeft: -1 }), /_left/, 'MHA_ERROR_INVALID_VALUE');
});

test('arrays of other lengths and types never reach the library', () => {
  for (const [options, message] of [
    [{ query: fill(31) }, /31 elements.*multiple of 8/], [{ batch: 2.5 }, /an integer/],
    [{ nQ: 5 }, /32 elements; it must have 40/], [{ output: fill(8) }, /output has 8 elem.* 32/],
    [{ query: new Float64Array(32) }, /Float64Array.*Float32Array/],
    [{ score: { sinks: [1] } }, /sinks has 1 .* 2/], [{ outputs: { lse: fill(1) } }, /lse has 1/],
    [{ norm: { epsilon: 1, qWeight: fill(8), kWeight: fill(4) } }, /kWeight has 4 elements.* 8/],
    [{ score: { sinks: [1, 2, 3] } }, /sinks has 3/], [{ nKv: 1, outputs: { k: true } }, /no key/],
  ]) refuses(() => layer.forward({ query: x, ...options }), message);
  assert.equal(layer.forward({ query: fill(0), nQ: 0 }).output.length, 0);
  refuses(() => mha.layer({ ...small, wO: { data: fill(64), bias: fill(7) } }), /bias has 7.* 8/);
  const q = { data: fill(40), strides: { row: 16 } }, output = fill(24);
  const call = { numHeads: 1, headDim: 8, nQ: 3, q, k: x, v: x, output };
  refuses(() => mha.attention({ ...call, nKv: 5 }), /k has 32 elements; it must have 40/);
  refuses(() => mha.attention({ ...call, nQ: 4 }), /at least 56/);
  mha.attention(call);
  assert.deepEqual(mha.alibiSlopes(2), Float32Array.of(0.0625, 0.00390625));
  assert.throws(() => { mha.alloc(Float32Array, 8).length = 9; }, /read only/);
  const query = Object.defineProperty(fill(31), 'length', { value: 32 });
  refuses(() => layer.forward({ query }), /query has 31 elements; it must have 32/);
  refuses(() => mha.alloc(Array, 5), /a class of typed arrays/);
  refuses(() => layer.forward({ query: { data: [...x], type: 'f16' } }), /must be a Uint16Array/);
});

test('what is disposed of, and objects of other engines, are refused', async () => {
  const other = await load(), used = other.usedBytes, gone = other.layer(small);
  refuses(() => layer.forward({ query: other.alloc(Float32Array, 32) }), /same engine/);
  const cache = other.kvCache({ numSequences: 1, capacity: 9, numKvHeads: 2, headDim: 4 });
  refuses(() => layer.forward({ query: x, causal: true, cache }), /same engine/);
  { using block = other.alloc(Float32Array, 4); block.view.fill(1); }
  gone.dispose(), gone.dispose(), cache.dispose();
  refuses(() => gone.forward({ query: x }), /this Layer is disposed of/);
  refuses(() => cache.length(), /this KvCache is disposed of/);
  assert.ok(other.usedBytes <= used + 128 + 4096);
});

test('memory is limited before anything is allocated, and views are renewed', async () => {
  const own = await load({ maxBytes: 2 ** 20 }), before = [own.memoryBytes, own.usedBytes];
  refuses(() => own.alloc(Float32Array, 2 ** 18), /maxBytes is 1048576/, 'MHA_ERROR_OUT_OF_MEMORY');
  refuses(() => mha.alloc(Float32Array, 2 ** 31), /bytes are needed/, 'MHA_ERROR_OUT_OF_MEMORY');
  refuses(() => own.layer({ ...small, queryDim: 512, wQkv: fill(512 * 1536), wO: fill(512 * 512) }),
    /maxBytes/, 'MHA_ERROR_OUT_OF_MEMORY');
  assert.deepEqual([own.memoryBytes, own.usedBytes], before);
  await assert.rejects(load({ maxBytes: 2 ** 33 }), /less than 4 GiB/);
  const block = mha.alloc(Float32Array, 32), old = block.view;
  old.set(x);
  mha.alloc(Uint8Array, 2 ** 26).dispose();
  assert.equal(old.length, 0);
  refuses(() => layer.forward({ query: old }), /query is detached/);
  assert.deepEqual(layer.forward({ query: block }), layer.forward({ query: x }));
  assert.deepEqual(block.view, x);
});

test('layers and caches are saved, and loaded again', () => {
  assert.deepEqual(mha.layerView(layer.save()).forward({ query: x }), layer.forward({ query: x }));
  const cache = mha.kvCache({ numSequences: 2, capacity: 9, numKvHeads: 2, headDim: 4 });
  layer.forward({ query: x, causal: true, cache });
  refuses(() => cache.truncate(0, 2 ** 64), /must be an integer/);
  cache.copyPrefix(0, 1, 3), cache.truncate(0, 2), cache.append(1, { k: fill(8), v: fill(8) });
  const copy = mha.kvCacheView(cache.save());
  assert.deepEqual([copy.length(), copy.length(1)], [2, 4]);
  assert.deepEqual(copy.read(1, 3, 1), { k: fill(8), v: fill(8) });
});

test('the module is the one for the engine, imports nothing, and is small', () => {
  const program = "console.log((await (await import('mha-wasm')).load()).instructionSet)";
  const set = (...flags) => run(process.execPath, ...flags, '--input-type=module', '-e', program);
  assert.equal(set('--no-enable-fma3'), 'wasmSimd128\n');
  if (/ fma /.test(fs.readFileSync('/proc/cpuinfo'))) assert.match(set(), /^wasm(Relaxed|.*Dot)\n/);
  for (const name of ['mha.wasm', 'mha_simd128.wasm']) {
    const bytes = fs.readFileSync(`${installed}/${name}`);
    assert.deepEqual(WebAssembly.Module.imports(new WebAssembly.Module(bytes)), []);
    assert.ok(bytes.length < 650e3, `${name} has ${bytes.length} bytes`);
  }
});

const readme = fs.readFileSync(`${installed}/README.md`, 'utf8');
const [, example, printed] = /```js\n(.*?)```\n\n```text\n(.*?)```/s.exec(readme);

test("README's example prints what README says", () =>
  assert.equal(run(process.execPath, '--input-type=module', '-e', example), printed));

test("README's examples in a bundle by Vite", { skip: !chromium && 'no Chromium' }, async () => {
  const [, worker] = /make them in a worker.*?```js\n(.*?)```/s.exec(readme);
  const write = (name, text) => fs.writeFileSync(`${project}/${name}`, text);
  write('worker.js', 'const wQkv = Array(192).fill(0), wO = Array(64).fill(0);\n' + worker);
  write('main.js', `let text = '';
    const console = { log(line) { text += line + '\\n'; } };
    ${example}
    const worker = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
    worker.onmessage = ({ data }) => fetch('/', { method: 'POST', body: text + data });
    worker.postMessage(fill(8));`);
  write('index.html', '<script type=module src=main.js></script>');
  run(`${folder}/node_modules/.bin/vite`, 'build', '--logLevel', 'error');
  assert.equal(await posted(`${project}/dist`), `${printed}${Array(8).fill(0)}`);
});

test('the types compile', () => {
  fs.copyFileSync(`${import.meta.dirname}/wasm_types.ts`, `${project}/types.ts`);
  const words = '--strict --noEmit --target esnext --module nodenext --lib esnext,dom types.ts';
  run(`${folder}/node_modules/.bin/tsc`, ...words.split(' '));
});
