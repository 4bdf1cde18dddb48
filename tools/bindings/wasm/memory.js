// The module's memory, and what lives in it.
import { scalars, structs } from './structs.js';

/** A refusal of the library: `message` is the C library's, and `status` such as
 * "MHA_ERROR_SHAPE". */
export class MhaError extends Error {
  constructor(status, message) {
    super(message);
    this.name = 'MhaError';
    this.status = status;
  }
}

export const machineOf = Symbol('machine'), buffer = Symbol('buffer'), address = Symbol('address');
export const kind = Symbol('kind');
const leaks = new FinalizationRegistry(({ machine, at }) => machine.free(at));

/** An instance of the module and its memory. Every allocation passes through here. */
export class Machine {
  #sizes = new Map();
  #buffers = { scratch: [0, 0], workspace: [0, 0] };
  #data;

  constructor(exports, maxBytes) {
    this.exports = exports;
    this.maxBytes = maxBytes;
    this.used = 0;
    exports._initialize?.();
    this.error = this.allocate(structs.mha_error.size);
    this.result = this.allocate(Math.max(...Object.values(structs).map(({ size }) => size)));
    this.structs = this.allocate(8192);
  }

  get data() {
    if (this.#data?.buffer !== this.exports.memory.buffer)
      this.#data = new DataView(this.exports.memory.buffer);
    return this.#data;
  }

  array(Type, at, length) {
    return new Type(this.exports.memory.buffer, at, length);
  }

  check(bytes) {
    if (!(bytes <= this.maxBytes - this.used))
      throw new MhaError('MHA_ERROR_OUT_OF_MEMORY',
        `${bytes} bytes are needed, but ${this.used} are in use and maxBytes is ` +
        `${this.maxBytes}; dispose of layers, caches and blocks, or load with a larger maxBytes`);
  }

  allocate(bytes) {
    this.check(bytes);
    const at = this.exports.aligned_alloc(64, Math.ceil(Math.max(bytes, 1) / 64) * 64) >>> 0;
    if (!at)
      throw new MhaError('MHA_ERROR_OUT_OF_MEMORY', `the engine has no ${bytes} bytes left`);
    this.#sizes.set(at, bytes);
    this.used += bytes;
    return at;
  }

  /** What `make` makes in new memory, which is freed if it throws. */
  within(bytes, make) {
    const at = this.allocate(bytes);
    try {
      return make(at);
    } catch (error) {
      this.free(at);
      throw error;
    }
  }

  free(at) {
    this.used -= this.#sizes.get(at) ?? 0;
    this.#sizes.delete(at);
    this.exports.free(at);
  }

  /** Makes two buffers, whose contents are lost, at least this large, both or none of them. */
  reserve(wanted) {
    const grown = Object.entries(wanted).filter(([name, bytes]) => bytes > this.#buffers[name][1]);
    this.check(grown.reduce((sum, [name, bytes]) => sum + bytes - this.#buffers[name][1], 0));
    for (const [name, bytes] of grown) {
      this.release(name);
      this.#buffers[name] = [this.allocate(bytes), bytes];
    }
    return { scratch: this.#buffers.scratch[0], workspace: this.#buffers.workspace[0] };
  }

  release(name) {
    if (this.#buffers[name][0]) this.free(this.#buffers[name][0]);
    this.#buffers[name] = [0, 0];
  }

  text(at) {
    const bytes = this.array(Uint8Array, at);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  /** Calls a function that returns a status, and throws what it refuses. */
  call(name, ...values) {
    const status = this.exports[name](...values, this.error);
    if (status === 0) return;
    const word = this.text(this.exports.mha_status_string(status));
    throw new MhaError(word, this.text(this.error + 8));
  }

  /** A number that a function writes behind its other arguments: bytes, a pointer, a length. */
  number(name, ...values) {
    this.call(name, ...values, this.result);
    return this.data.getUint32(this.result, true);
  }

  read(struct, at) {
    const result = {};
    for (const { name, type, hidden, choices, at: offset } of structs[struct].fields) {
      const place = at + offset;
      if (hidden) continue;
      if (type === 'f32') result[name] = this.data.getFloat32(place, true);
      else if (scalars[type] === 8) result[name] = Number(this.data.getBigInt64(place, true));
      else if (structs[type]) result[name] = this.read(type, place);
      else result[name] = this.data.getUint32(place, true);
      const known = choices && Object.entries(choices).find(([, x]) => x === result[name]);
      if (choices) result[name] = known?.[0] ?? null;
    }
    return result;
  }

  /** A struct that a function fills, whose size is set before. */
  filled(struct, name, ...values) {
    this.data.setUint32(this.result, structs[struct].size, true);
    this.call(name, ...values, this.result);
    return this.read(struct, this.result);
  }

  copy(at, { buffer: from, byteOffset, byteLength }) {
    this.array(Uint8Array, at, byteLength).set(new Uint8Array(from, byteOffset, byteLength));
  }
}

/** What lives in the module's memory until it is disposed of. */
export class Owned {
  #at;
  #pointer;

  constructor(machine, name, at, pointer = at) {
    Object.defineProperty(this, machineOf, { value: machine });
    Object.defineProperty(this, kind, { value: name });
    this.#at = at;
    this.#pointer = pointer;
    leaks.register(this, { machine, at }, this);
  }

  get [buffer]() {
    if (!this.#at) throw new Error(`this ${this[kind]} is disposed of`);
    return this.#at;
  }

  get [address]() {
    return this[buffer] && this.#pointer;
  }

  dispose() {
    if (!this.#at) return;
    leaks.unregister(this);
    this[machineOf].free(this.#at);
    this.#at = 0;
  }
}
if (Symbol.dispose) Owned.prototype[Symbol.dispose] = Owned.prototype.dispose;

export const typedArrays = [Float32Array, Float64Array, Int8Array, Uint8Array, Uint16Array,
  Int32Array, BigInt64Array, globalThis.Float16Array].filter(Boolean);

/** An array in the module's memory, which calls take without a copy. */
export class Block extends Owned {
  #view;

  constructor(machine, Type, length) {
    if (!Number.isSafeInteger(length) || length < 0)
      throw new RangeError(`length is ${length}; it must be an integer of at least 0`);
    if (!typedArrays.includes(Type)) throw new TypeError('Type must be a class of typed arrays');
    super(machine, 'Block', machine.allocate(length * Type.BYTES_PER_ELEMENT));
    Object.freeze(Object.assign(this, { Type, length }));
  }

  /** The elements. The array loses them when the memory grows, which any call may do, so do not
   * keep it; after dispose() it must not be used. */
  get view() {
    const at = this[address], memory = this[machineOf].exports.memory;
    leaks.unregister(this);  // the array may outlive this object
    if (this.#view?.buffer !== memory.buffer)
      this.#view = new this.Type(memory.buffer, at, this.length);
    return this.#view;
  }
}
