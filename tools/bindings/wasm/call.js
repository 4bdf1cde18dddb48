// A call: its structs, filled from options, and the arrays to check and to copy.
import { address, Block, kind, machineOf, typedArrays } from './memory.js';
import { camel, constants, int64Min, knownOptions, nearest, scalars, structs } from './structs.js';

const Half = globalThis.Float16Array;
const elements = { f32: [Float32Array], f16: Half ? [Uint16Array, Half] : [Uint16Array],
  bf16: [Uint16Array], int8: [Int8Array], int4: [Uint8Array], 'f32*': [Float32Array],
  'f64*': [Float64Array], 'i64*': [BigInt64Array], 'i32*': [Int32Array], 'u8*': [Uint8Array] };
const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const typed = Object.getPrototypeOf(Int8Array).prototype;  // whose getters no array can replace
const [nameOf, lengthOf] = [Symbol.toStringTag, 'length'].map((key) =>
  Object.getOwnPropertyDescriptor(typed, key).get);
const isArray = (x) => x instanceof Block || ArrayBuffer.isView(x) || Array.isArray(x);
const list = (x) => Array.from(x instanceof Block ? x.view : x, Number);

/** Extents by name: what was given, or else what the headers say that 0 means; NaN of others, which
 * no array can have. */
class Extents {
  rules = { count: (e) => e.get('batch'), relativeLeft: () => 0, relativeRight: () => 0 };
  parts = [];  // the structs: their rules, and places of numbers

  constructor(values) {
    this.values = Object.assign(Object.create(null), values);
  }

  get(name) {
    const value = this.values[name];
    if (value !== undefined) return value;
    const rule = this.rules[name] ?? this.parts.find(({ rules }) => rules[name])?.rules[name];
    return rule ? rule(this) : NaN;
  }
}

export class Call {
  #arrays = [];
  #copies = [];
  #next;
  #results = {};
  scratch = 0;

  constructor(machine, extents) {
    this.machine = machine;
    this.#next = machine.structs;
    this.extents = new Extents(extents);
  }

  #room(bytes) {
    const at = this.#next;
    this.#next += Math.ceil(bytes / 8) * 8;
    this.machine.array(Uint8Array, at, bytes).fill(0);
    return at;
  }

  /** The addresses of these structs, filled from one object of options. */
  add(what, options, names, isOuter = true) {
    const starts = names.map((name) => {
      const at = this.#room(structs[name].size);
      this.machine.data.setUint32(at, structs[name].size, true);
      return at;
    });
    this.#fill(what, options, names, starts, isOuter);
    return starts;
  }

  #fill(what, options, names, starts, isOuter = false) {
    if (typeof options !== 'object' || options === null || isArray(options))
      throw new TypeError(`${what} is ${options}; it must be an object of options`);
    const { known, rules, places, written } = knownOptions(names);
    this.extents.parts.push({ rules, places, starts });
    for (const name in options) {
      const value = options[name], field = known.get(name);
      if (value === undefined) continue;
      if (!field)
        throw new TypeError(
          `${what} has no option ${name}; do you mean ${nearest(name, known.keys())}?`);
      const start = starts[field.index];
      this.#set({ start, at: start + field.at, field, name, options }, value);
    }
    if (!isOuter || options.outputs?.partials) return;
    for (const field of written) {
      const { name } = field, start = starts[field.index];
      if (options[name] === undefined)
        this.#arrays.push({ start, at: start + field.at, field, name, options, data: true });
    }
  }

  #set(entry, value) {
    const { start, at, field, name } = entry, { type, choices } = field, { data } = this.machine;
    if (field.bit && value !== false) {
      const place = start + field.flagsAt;
      data.setUint32(place, data.getUint32(place, true) | field.bit, true);
    }
    if (type === 'flag') {
      if (typeof value !== 'boolean')
        throw new TypeError(`${name} is ${value}; it must be true or false`);
    } else if (choices) {
      if (!Object.hasOwn(choices, value)) {
        const listed = Object.keys(choices).map((choice) => `'${choice}'`).join(', ');
        throw new TypeError(`${name} is ${JSON.stringify(value)}; it must be one of ${listed}`);
      }
      data.setUint32(at, choices[value], true);
    } else if (type in scalars) {
      this.#number(at, field, value);
    } else if (type === 'mha_kv_cache*') {
      data.setUint32(at, addressOf(value, 'KvCache', this.machine, name), true);
    } else if (field.shapes.length) {
      this.#array(entry, value);
    } else if (type.endsWith('*')) {
      const starts = type === 'mha_sequences*' && value?.cuSeqlensQ;
      const given = starts ? { ...value, count: value.count ?? starts.length - 1 } : value;
      data.setUint32(at, this.add(name, given, [type.slice(0, -1)], false)[0], true);
    } else if (type === 'mha_strides') {
      this.#strides(at, value, name);
    } else {
      this.#fill(name, value, [type], [at]);
    }
  }

  #number(at, { name, type, empty }, value) {
    const { data } = this.machine, isReal = type[0] === 'f';
    const most = type === 'i64' ? Number.MAX_SAFE_INTEGER : 2 ** 32 - 1;
    const fits = Number.isInteger(value) && value <= most && value >= (type === 'i64' ? -most : 0);
    if (typeof value !== 'number' || (!isReal && !fits))
      throw new TypeError(`${name} is ${value}; it must be ${isReal ? 'a number' : 'an integer'}`);
    if (value !== 0 || empty) this.extents.values[name] = value;
    if (type === 'f32') data.setFloat32(at, value, true);
    else if (type === 'f64') data.setFloat64(at, value, true);
    else {
      data.setUint32(at, value, true);  // modulo 2^32
      if (type === 'i64')
        data.setInt32(at + 4, empty && !value ? -(2 ** 31) : Math.floor(value / 2 ** 32), true);
    }
  }

  #strides(at, strides, name) {
    for (const [axis, stride] of Object.entries(strides)) {
      const field = structs.mha_strides.fields.find((x) => x.name === axis);
      if (!field || !(stride === 'broadcast' || (Number.isSafeInteger(stride) && stride >= 0)))
        throw new TypeError(`${name} has ${axis} ${stride}; it may have batch, row and head, ` +
          "each an integer of at least 0 or 'broadcast'");
      const number = stride === 'broadcast' ? int64Min : BigInt(stride);
      this.machine.data.setBigInt64(at + field.at, number, true);
    }
  }

  /** An input, an output or a matrix is an array or an object with its data, strides, bias, ... */
  #array(entry, value) {
    const { field, at, name } = entry;
    const isPlain = isArray(value) || value === true || !structs[field.type];
    if (!isPlain && (typeof value !== 'object' || value === null))
      throw new TypeError(`${name} is ${value}; it must be an array, or an object with its data`);
    const { data, ...given } = isPlain ? { data: value } : value;
    const before = this.#arrays.length;
    if (!isPlain) this.#fill(name, given, [field.type], [at]);
    for (const inner of this.#arrays.slice(before)) inner.matrix = entry;
    if (data !== undefined) this.#arrays.push({ ...entry, data, given });
    else if (field.type !== 'mha_matrix') throw new TypeError(`${name} has no data`);
  }

  /** A pointer that is an argument itself; `pointer` reads it after commit(). */
  argument(name, data, type, count, written = false) {
    const at = this.#room(8), field = { type, written };
    if (data !== undefined) this.#place({ name, field, data }, at, type, count);
    return at;
  }

  pointer(at) { return this.machine.data.getUint32(at, true); }

  /** Finds extents from the lengths of arrays, checks every array, and sets every pointer to a
   * number that is not NULL: functions for sizes read no array. */
  prepare() {
    // What one array tells may be what is missing for another one.
    if (this.#arrays.map((entry) => this.#infer(entry)).some(Boolean))
      this.#arrays.forEach((entry) => this.#infer(entry));
    for (const entry of this.#arrays) {
      const { field, at, options, data, given, matrix } = entry;
      if (field.type === 'mha_matrix') {
        const type = options.type ?? 'f32', [rows, columns] = this.#matrixOf(entry);
        const count = type === 'int4' ? columns * Math.ceil(rows / 2) : rows * columns;
        this.#place(entry, at, type, count, () => ` for [${rows}, ${columns}]`);
      } else if (matrix) {
        const [rows, columns] = this.#matrixOf(matrix), format = matrix.options.format ?? {};
        const groupSize = format.groupSize || (matrix.options.type === 'int4' ? 32 : 0);
        const extents = new Extents({ in: rows, out: columns, groupSize });
        const shape = field.shapes[groupSize ? field.shapes.length - 1 : 0];
        this.#place(entry, at, field.type, ...sized(shape, extents));
      } else {
        const strides = given?.strides ?? options[`${entry.name}Strides`];
        const sizes = sized(this.#shapeOf(entry), this.extents, strides);
        let { type } = field;
        if (structs[type]) {
          const isHalf = Half && (data?.Type ?? data?.constructor) === Half;
          type = given?.type ?? (isHalf ? 'f16' : 'f32');
          const place = at + structs[field.type].fields.find((x) => x.name === 'type').at;
          this.machine.data.setUint32(place, constants[`TYPE_${type.toUpperCase()}`], true);
        }
        this.#place(entry, at, type, ...sizes);
      }
    }
    return this;
  }

  /** Whether something was not given that the length of this array may tell. */
  #infer({ data, field, given, name }) {
    if (!isArray(data) || given?.strides || field.type === 'mha_matrix') return false;
    const [shape] = field.shapes;
    let unknown, others = 1;
    for (const extent of shape) {
      const value = extent.of(this.extents);
      if (!Number.isNaN(value)) others *= value;
      else if (unknown) return true;
      else unknown = extent;
    }
    const { text } = unknown ?? {}, part = this.extents.parts.find((x) => x.places.has(text));
    if (!part || this.extents.rules[text]) return Boolean(unknown);
    const extent = data.length / others, number = part.places.get(text);
    if (Number.isInteger(extent))
      this.#number(part.starts[number.index] + number.at, number, extent);
    else if (others > 0)
      throw new RangeError(`${name} has ${data.length} elements; its shape is ` +
        `[${shape.map((x) => x.text).join(', ')}], so it has a multiple of ${others}`);
    return true;
  }

  #matrixOf({ field, name, options }) {
    const { extents } = this;
    const [rows, columns] = field.shapes[0].map(({ of }) => of(extents));
    const isGated = options.gatePlace === 'inWQ' && (name === 'wQ' || name === 'wQkv');
    return [rows, columns + (isGated ? extents.get('numHeads') * extents.get('gateDim') : 0)];
  }

  /** Which of its shapes an array has. The weights of a norm are all for one head or for each. */
  #shapeOf({ field, name, options, start }) {
    const { shapes } = field;
    if (field.struct !== 'mha_norm') return shapes[0];
    const isContext = name.startsWith('context');
    const names = isContext ? ['contextWeight', 'contextBias']
      : ['qWeight', 'kWeight', 'qBias', 'kBias'];
    const isOne = isContext ? options.contextAllHeads : options.allHeads;
    const width = this.extents.get(isContext ? 'headDimV' : 'headDim');
    const isEach = isOne || names.some((x) => options[x] && options[x].length !== width);
    const stride = isContext ? 'contextHeadStride' : 'headStride';
    const { at } = structs.mha_norm.fields.find((x) => x.name === stride);
    this.machine.data.setBigInt64(start + at, BigInt(isEach ? width : 0), true);
    return shapes[isEach ? 1 : 0];
  }

  /** Checks an array of `count` elements, or at least as many, and notes where it comes from. */
  #place({ name, field, data }, at, type, count, shape = () => '', isLeast = false) {
    const { machine } = this, Types = elements[type];
    const bytes = count * Types[0].BYTES_PER_ELEMENT, { written } = field;
    let source = data;
    if (Array.isArray(data) || (type === 'i64*' && ArrayBuffer.isView(data))) {
      if (written)
        throw new TypeError(`${name} is written to; it must be a typed array or a block`);
      source = converted(data, Types[0], name);
    }
    const Type = source === true ? Types[0] : source instanceof Block ? source.Type
      : typedArrays.find((x) => x.name === nameOf.call(source));
    if (!Types.includes(Type) || (source === true && !written)) {
      const wanted = Types.map((x) => x.name).join(' or ');
      const found = Type?.name ?? String(source);
      throw new TypeError(`${name} is a ${found}; it must be a ${wanted}`);
    }
    const length = source === true ? count
      : source instanceof Block ? source.length : lengthOf.call(source);
    if (source.buffer?.detached)
      throw new TypeError(`${name} is detached: it was transferred, or the module's memory has ` +
        'grown; take the view of the block again, or pass the block');
    if (isLeast ? length < count : length !== count)
      throw new RangeError(`${name} has ${length} elements; it must have ` +
        `${isLeast ? 'at least ' : ''}${count}${shape()}`);
    if (written) this.#results[name] = source;
    let pointer = machine.structs;  // of no elements
    if (source instanceof Block) pointer = addressOf(source, 'Block', machine, name);
    else if (source.buffer === machine.exports.memory.buffer) pointer = source.byteOffset;
    else if (bytes > 0) {
      const end = source === true ? bytes : Math.max(bytes, source.byteLength);
      this.#copies.push({ at, source, name, Type, count, written, offset: this.scratch });
      this.scratch += Math.ceil(end / 64) * 64;
    } else if (source === true) this.#results[name] = new Type(0);
    machine.data.setUint32(at, pointer, true);
  }

  /** Copies arrays into the module's memory and returns the address of the workspace. */
  commit(workspaceBytes = 0) {
    const { machine } = this;
    const wanted = { scratch: this.scratch, workspace: workspaceBytes };
    const { scratch, workspace } = machine.reserve(wanted);
    for (const { at, source, offset } of this.#copies) {
      machine.data.setUint32(at, scratch + offset, true);
      if (source !== true) machine.copy(scratch + offset, source);
    }
    return workspace;
  }

  /** What was written, by name. */
  results() {
    const { machine } = this, { scratch } = machine.reserve({});
    for (const { source, name, Type, count, written, offset } of this.#copies) {
      if (!written) continue;
      const found = machine.array(Type, scratch + offset, source === true ? count : source.length);
      if (source === true) this.#results[name] = found.slice();
      else source.set(found);
    }
    return this.#results;
  }
}

function addressOf(value, wanted, machine, name) {
  if (value?.[kind] !== wanted || value[machineOf] !== machine)
    throw new TypeError(`${name} must be a ${wanted} of the same engine`);
  return value[address];
}

function converted(data, Type, name) {
  if (Type === Uint16Array)
    throw new TypeError(`${name} is an Array; of f16 and bf16 it must be a Uint16Array`);
  const isInteger = !Type.name.startsWith('Float');
  for (const x of data) {
    const fits = typeof x === 'bigint' || typeof x === 'boolean' || Number.isInteger(x);
    if (isInteger ? !fits : typeof x !== 'number')
      throw new TypeError(`${name} has ${x}, which is no ${isInteger ? 'integer' : 'number'}`);
  }
  const made = Type.from(data, Type === BigInt64Array ? BigInt : Number);
  if (isInteger && made.some((x, i) => x != data[i]))
    throw new RangeError(`${name} has a number that a ${Type.name} cannot hold`);
  return made;
}

/** The elements of an array of this shape, the text of it, and whether it may have more. */
function sized(shape, extents, strides) {
  const values = shape.map(({ of }) => of(extents));
  const text = () => `[${shape.map((extent) => extent.text).join(', ')}]`;
  const missing = values.findIndex((value) => !(value >= 0));
  if (missing >= 0)
    throw new RangeError(`an array of ${text()} is given, but not ${shape[missing].text}`);
  if (!strides) return [product(values), () => ` for ${text()} = [${values.join(', ')}]`];
  let span = 0, contiguous = 1;
  for (let i = values.length - 1; i >= 0; i--) {
    const name = shape[i].text;
    const axis = name === 'batch' ? 'batch' : /^(nQ|nKv|rows)$/.test(name) ? 'row'
      : /Heads/.test(name) ? 'head' : undefined;
    const stride = (axis && strides[axis]) || contiguous;
    if (stride === 'broadcast') continue;
    span += (values[i] - 1) * stride;
    contiguous = values[i] * stride;
  }
  return [product(values) && span + 1, () => ` for ${text()} with these strides`, true];
}

/** Which keys a call has: n_kv of its arrays, and the columns of arrays with a number for each
 * pair. */
export function setKeys({ extents }, options, key, value) {
  if (!isArray(value) && !value?.data && (key ?? undefined) === undefined) {
    if (options.nKv !== undefined)
      throw new TypeError('nKv is given, but no key; leave it out: it is nQ, or the cache has it');
    if (key === undefined) extents.rules.nKv = (e) => e.get('nQ');
  }
  const cache = options.cache ?? options.cacheRead, given = options.sequences ?? {};
  extents.rules.keys = (e) => {
    if (cache?.[kind] !== 'KvCache') return e.get('nKv');
    const side = key === undefined ? 'q' : 'kv', rows = e.get('nKv');
    const [starts, lengths, firsts, numbers] = [given.cuSeqlensKv ?? given.cuSeqlensQ,
      given[`${side}Lengths`], given[`${side}FirstRows`], given.cacheSequences]
      .map((array) => array && list(array));
    const added = (i) => options.cacheRead ? 0
      : starts ? starts[i + 1] - starts[i] : lengths?.[i] ?? rows - (firsts?.[i] ?? 0);
    const count = starts ? starts.length - 1 : e.get('count');
    return Math.max(0, ...Array.from({ length: count }, (_, i) =>
      added(i) + cache.length(numbers?.[i] ?? i)));
  };
  extents.rules.numColumns = (e) =>
    e.get(options.scoreArrays?.columnKeys === 'newKeys' ? 'nKv' : 'keys');
}

const structOf = (name) => `${name.replace('recurrent_attention', 'recurrent')}_args`;

export function run(call, name, options, ...before) {
  const { machine } = call, [args] = call.add('options', options, [structOf(name)]);
  call.prepare();
  const bytes = machine.number(`${name}_workspace`, ...before, args);
  machine.call(name, ...before, args, call.commit(bytes), bytes);
  return call.results();
}

export function infoOf(call, name, options, ...before) {
  const { machine } = call, [args] = call.add('options', options, [structOf(name)]);
  call.prepare().commit();
  const info = machine.filled('mha_call_info', `${name}_info`, ...before, args);
  info.instructionSet = camel(machine.text(
    machine.exports.mha_instruction_set_name(info.instructionSet)));
  return { ...info, backEnd: ['native', 'sgemm'][info.backEnd] };
}
