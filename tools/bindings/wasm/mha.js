// mha for JavaScript: the C interface, with its names in camel case, over mha.wasm.
import { Call, infoOf, run, setKeys } from './call.js';
import { address, Block, buffer, Machine, machineOf, MhaError, Owned } from './memory.js';

export { Block, MhaError };

/** What the library keeps in the module's memory, and can be saved. */
class Stored extends Owned {
  #bytes;

  constructor(machine, name, shape, at, pointer, bytes) {
    // First, since what throws below would be freed twice.
    const config = machine.filled(`mha_${shape}_config`, `mha_${shape}_shape`, pointer);
    super(machine, name, at, pointer);
    this.#bytes = bytes;
    this.shape = Object.freeze(config);
  }

  get bytes() { return this.#bytes; }

  save() {
    return this[machineOf].array(Uint8Array, this[buffer], this.#bytes).slice();
  }
}

/** Packed weights: an attention layer, or a linear one. */
export class Layer extends Stored {
  #extents;

  constructor(machine, at, pointer, bytes) {
    super(machine, 'Layer', 'layer', at, pointer, bytes);
    const { numHeads, headDimV, queryDim } = this.shape;
    const inputDim = numHeads ? numHeads * headDimV : queryDim;
    const known = Object.entries({ ...this.shape, inputDim }).filter(([, extent]) => extent > 0);
    this.#extents = Object.fromEntries(known);
    Object.freeze(this);
  }

  forward(options) { return run(this.#call(options), 'mha_forward', options, this[address]); }

  forwardInfo(options) {
    return infoOf(this.#call(options), 'mha_forward', options, this[address]);
  }

  linear(options) { return run(this.#call(options), 'mha_linear', options, this[address]); }

  #call(options) {
    const call = new Call(this[machineOf], this.#extents);
    setKeys(call, options, options.key, options.value);
    return call;
  }
}

/** A KV cache. */
export class KvCache extends Stored {
  constructor(machine, at, pointer, bytes) {
    super(machine, 'KvCache', 'kv_cache', at, pointer, bytes);
    Object.freeze(this);
  }

  length(sequence = 0) {
    return this[machineOf].number('mha_kv_cache_length', this[address], BigInt(sequence));
  }

  truncate(sequence, length) {
    if (!Number.isSafeInteger(length)) throw new TypeError(`length ${length} must be an integer`);
    this[machineOf].call('mha_kv_cache_truncate', this[address], BigInt(sequence), BigInt(length));
  }

  copyPrefix(from, to, length) {
    const numbers = [from, to, length].map(BigInt);
    this[machineOf].call('mha_kv_cache_copy_prefix', this[address], ...numbers);
  }

  setBlocks(sequence, blocks) {
    const call = new Call(this[machineOf]);
    const at = call.argument('blocks', blocks, 'i32*', blocks.length);
    call.commit();
    this[machineOf].call('mha_kv_cache_set_blocks', this[address], BigInt(sequence),
      call.pointer(at), BigInt(blocks.length));
  }

  unshare(sequence, block = -1) {
    const name = 'mha_kv_cache_unshare';
    return this[machineOf].number(name, this[address], BigInt(sequence), block) === 1;
  }

  append(sequence, { k, v }) {
    const { call, k: toK, v: toV, count } = this.#rows(k?.length / this.#width('headDim'), k, v);
    call.commit();
    this[machineOf].call('mha_kv_cache_append', this[address], BigInt(sequence), BigInt(count),
      call.pointer(toK), call.pointer(toV));
  }

  read(sequence, first, count) {
    const v = this.shape.valuePlace === 'inKeys' ? undefined : true;
    const { call, k: toK, v: toV } = this.#rows(count, true, v, true);
    call.commit();
    this[machineOf].call('mha_kv_cache_read', this[address], BigInt(sequence), BigInt(first),
      BigInt(count), call.pointer(toK), call.pointer(toV));
    return call.results();
  }

  #width(name) { return this.shape.numKvHeads * this.shape[name]; }

  #rows(count, k, v, written) {
    if (!Number.isInteger(count) || count < 0)
      throw new RangeError(`rows of ${this.#width('headDim')} keys are wanted, but ${count} rows`);
    const call = new Call(this[machineOf]);
    return {
      call, count,
      k: call.argument('k', k, 'f32*', count * this.#width('headDim'), written),
      v: call.argument('v', v, 'f32*', count * this.#width('headDimV'), written),
    };
  }
}

/** The library in one instance of the module. */
export class Engine {
  #machine;

  constructor(machine) {
    this.#machine = machine;
    const { exports } = machine, number = exports.mha_version();
    this.version = [number / 10000, (number / 100) % 100, number % 100].map(Math.floor).join('.');
    this.contract = exports.mha_contract();
    const smallest = { numHeads: 1, headDim: 1, q: [1], k: [1], v: [1] };
    this.instructionSet = this.attentionInfo(smallest).instructionSet;
  }

  get memoryBytes() { return this.#machine.exports.memory.buffer.byteLength; }
  get usedBytes() { return this.#machine.used; }
  alloc(Type, length) { return new Block(this.#machine, Type, length); }

  layer(options) {
    return this.#pack('mha_layer', options, 'mha_layer_config', 'mha_layer_weights');
  }

  linear(options) { return this.#pack('mha_linear', options, 'mha_linear_weights'); }

  #pack(name, options, ...names) {
    const machine = this.#machine, call = new Call(machine);
    call.extents.rules.qkvDim = (e) => e.get('numHeads') * e.get('headDim') +
      e.get('numKvHeads') * (e.get('headDim') + e.get('headDimV'));
    const starts = call.add('options', options, [...names, 'mha_layer_options']);
    const bytes = machine.number(`${name}_pack_size`, ...call.prepare() && starts);
    machine.check(bytes + call.scratch);
    call.commit();
    try {
      return this.#view(bytes, starts.at(-1),
        (at) => machine.call(`${name}_pack`, ...starts, at, bytes));
    } finally {
      machine.release('scratch');  // the weights as they were given
    }
  }

  /** A layer over packed weights that `fill` writes, and behind them the object of the library. */
  #view(bytes, options, fill) {
    const machine = this.#machine, storage = machine.exports.mha_layer_view_size();
    return machine.within(bytes + storage, (at) => {
      fill(at);
      const layer = machine.number('mha_layer_view', at, bytes, options, at + bytes, storage);
      return new Layer(machine, at, layer, bytes);
    });
  }

  layerView(bytes, options = {}) {
    const machine = this.#machine;
    if (!(bytes instanceof Uint8Array)) throw new TypeError('bytes must be a Uint8Array');
    const [at] = new Call(machine).add('options', options, ['mha_layer_options']);
    return this.#view(bytes.length, at, (to) => {
      machine.copy(to, bytes);
      machine.call('mha_layer_verify', to, bytes.length);
    });
  }

  kvCache(options) {
    const machine = this.#machine;
    const [config] = new Call(machine).add('options', options, ['mha_kv_cache_config']);
    const bytes = machine.number('mha_kv_cache_size', config);
    return machine.within(bytes, (at) =>
      new KvCache(machine, at, machine.number('mha_kv_cache_init', config, at, bytes), bytes));
  }

  kvCacheView(bytes) {
    const machine = this.#machine, { length } = bytes;
    if (!(bytes instanceof Uint8Array)) throw new TypeError('bytes must be a Uint8Array');
    return machine.within(length, (at) => {
      machine.copy(at, bytes);
      return new KvCache(machine, at, machine.number('mha_kv_cache_view', at, length), length);
    });
  }

  attention(options) { return run(this.#attention(options), 'mha_attention', options); }

  attentionInfo(options) { return infoOf(this.#attention(options), 'mha_attention', options); }

  #attention(options) {
    const call = new Call(this.#machine);
    setKeys(call, options, options.k ?? null, options.v);
    return call;
  }

  chooseKeys(options) {
    return run(this.#attention(options.attention ?? {}), 'mha_choose_keys', options);
  }

  recurrentAttention(options) {
    return run(new Call(this.#machine), 'mha_recurrent_attention', options);
  }

  causalConv(options) { return run(new Call(this.#machine), 'mha_causal_conv', options); }

  ropeTables(options) {
    const machine = this.#machine, call = new Call(machine);
    const [config] = call.add('options', options, ['mha_rope_config']);
    call.prepare().commit();
    const { dims, numPositions } = options, count = (numPositions * dims) / 2;
    const tables = [this.alloc(Float32Array, count), this.alloc(Float32Array, count)];
    machine.call('mha_rope_tables', config, ...tables.map((table) => table[address]));
    return { dims, numPositions, cos: tables[0], sin: tables[1] };
  }

  alibiSlopes(numHeads) {
    const call = new Call(this.#machine);
    const at = call.argument('slopes', true, 'f32*', numHeads, true);
    call.commit();
    this.#machine.call('mha_alibi_slopes', BigInt(numHeads), call.pointer(at));
    return call.results().slopes;
  }
}

/** Whether the engine has relaxed SIMD: it is asked by a module with f32x4.relaxed_madd in it. */
export const hasRelaxedSimd = WebAssembly.validate(Uint8Array.of(
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 19, 1, 17, 0, 65, 0, 253, 15,
  65, 0, 253, 15, 65, 0, 253, 15, 253, 133, 2, 11));

/** Instantiates the library. Each instance has memory of its own, of up to `maxBytes`. */
export async function load({ url, module, maxBytes = 2 ** 32 - 2 ** 16, ...other } = {}) {
  for (const name of Object.keys(other))
    throw new TypeError(`load has no option ${name}; it has url, module and maxBytes`);
  if (!(maxBytes > 0 && maxBytes < 2 ** 32))
    throw new RangeError(`maxBytes is ${maxBytes}; a module's memory is less than 4 GiB`);
  const start = async (place) => {
    const compiled = module ?? await WebAssembly.compile(await bytesOf(url ?? place));
    return (await WebAssembly.instantiate(compiled, {})).exports;
  };
  // mha.wasm is for engines whose multiply-adds are fused. Bundlers look for these very words.
  const mayStart = url || module || hasRelaxedSimd;
  let exports = mayStart ? await start(new URL('./mha.wasm', import.meta.url)) : null;
  if (!url && !module && !exports?.mha_instruction_sets())
    exports = await start(new URL('./mha_simd128.wasm', import.meta.url));
  if (!exports.mha_instruction_sets())
    throw new Error('this engine runs no kernels of the module; it needs mha_simd128.wasm');
  return new Engine(new Machine(exports, maxBytes));
}

async function bytesOf(url) {
  const files = globalThis.process?.getBuiltinModule?.('node:fs/promises');
  if (files && new URL(url).protocol === 'file:') return files.readFile(new URL(url));
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
}
