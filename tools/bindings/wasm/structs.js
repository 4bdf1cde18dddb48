// The structs of the C interface, laid out as C does for pointers of 32 bits.
import { constants as constantText, structs as structText } from './layout.js';

export const constants = Object.fromEntries(
  constantText.trim().split(/\s/).map((text) => text.split('=')).map(([n, x]) => [n, Number(x)]));
export const camel = (name) =>
  name.toLowerCase().replace(/_(.)/g, (_, letter) => letter.toUpperCase());
export const int64Min = -(2n ** 63n);  // MHA_EMPTY, MHA_BROADCAST
export const scalars = { u32: 4, size: 4, ptr: 4, out: 4, f32: 4, i64: 8, u64: 8, f64: 8 };
const pattern =
  /^(\S+) (-?)(\w+)(\??)(~?)(?:=([^\s[{!]+))?(!?)(?:\{(\|?)(\w*): (.*?)\})?((?:\[.*?\])*)$/;

/** Numbers that other fields say, such as numHeads*headDim, from left to right. */
function expression(text) {
  const called = /^(max|ceil)\((.*)\)$/.exec(text);
  if (called) {
    const terms = called[2].split(',').map(expression);
    return (e) => Math[called[1]](...terms.map((term) => term(e)));
  }
  const [first, ...rest] = text.split(/([-+*/])/);
  const value = (word, e) => (/^\d/.test(word) ? Number(word) : e.get(word));
  const apply = (sign, a, b) =>
    sign === '+' ? a + b : sign === '-' ? a - b : sign === '*' ? a * b : a / b;
  return (e) => rest.reduce((result, word, i) =>
    i % 2 ? apply(rest[i - 1], result, value(word, e)) : result, value(first, e));
}

function constantsOf(prefix, names) {
  const every = Object.keys(constants).filter((name) => name.startsWith(prefix));
  const listed = names === '*' ? every.map((name) => name.slice(prefix.length)) : names.split(' ');
  return Object.fromEntries(listed.map((name) => [camel(name), constants[prefix + name]]));
}

function fieldOf(text) {
  const [, type, hidden, name, optional, empty, or, needed, flags, prefix, names, shapes] =
    pattern.exec(text);
  return {
    name, type: type.replace('>', ''), hidden: Boolean(hidden), optional: Boolean(optional),
    written: type.endsWith('>') || type === 'mha_output', empty: Boolean(empty),
    needed: Boolean(needed), or: or && expression(or),
    [flags ? 'flags' : 'choices']: names && constantsOf(prefix, names),
    shapes: [...shapes.matchAll(/\[(.*?)\]/g)].map(([, shape]) =>
      shape.split(' ').map((extent) => ({ text: extent, of: expression(extent) }))),
  };
}

export const structs = {};
for (const line of structText.trim().split('\n')) {
  const colon = line.indexOf(': ');
  let size = 0, alignment = 4;
  const fields = line.slice(colon + 2).split(', ').map(fieldOf);
  for (const field of fields) {
    const inner = structs[field.type];
    const width = inner?.alignment ?? (field.type.endsWith('*') ? 4 : scalars[field.type] ?? 4);
    alignment = Math.max(alignment, width);
    field.at = Math.ceil(size / width) * width;
    size = field.at + (inner?.size ?? (field.type === 'text' ? 248 : width));
  }
  size = Math.ceil(size / alignment) * alignment;
  structs[line.slice(0, colon)] = { fields, size, alignment };
}

// What an object of options may have: of several structs, the fields of the call inside them, and
// the flags by name. A flag that is named as a field, such as windowLeft, is set with it.
const optionsOf = new Map();
// Extents that the length of an array tells where they are not given.
const inferred = new Set(Object.values(structs).flatMap(({ fields }) =>
  fields.flatMap(({ shapes }) => shapes.flat().map(({ text }) => text))));
export function knownOptions(names) {
  const key = names.join();
  if (optionsOf.has(key)) return optionsOf.get(key);
  const known = new Map();
  const add = (struct, index, base) => {
    for (const field of structs[struct].fields) {
      const at = base + field.at;
      if (field.name === 'call') add(field.type, index, at);
      else if (!field.hidden && !field.flags)
        known.set(field.name, { ...field, at, index, struct });
    }
    for (const { name, flags, at } of structs[struct].fields.filter((field) => field.flags)) {
      for (const [flag, bit] of Object.entries(flags)) {
        const start = name.slice(0, -'flags'.length);
        const option = start ? start + flag[0].toUpperCase() + flag.slice(1) : flag;
        const place = { flagsAt: base + at, bit };
        known.set(option, { name: option, type: 'flag', index, ...known.get(option), ...place });
      }
    }
  };
  names.forEach((name, index) => add(name, index, 0));
  const numbers = [...known.values()].filter((field) => field.type === 'i64' || field.or);
  const rules = numbers.filter((field) => field.or || !inferred.has(field.name))
    .map((field) => [field.name, field.or ?? (() => 0)]);
  const found = {
    known, rules: Object.fromEntries(rules),
    places: new Map(numbers.filter(({ name }) => inferred.has(name)).map((x) => [x.name, x])),
    written: [...known.values()].filter((field) => field.written && !field.optional),
  };
  optionsOf.set(key, found);
  return found;
}

export function nearest(word, words) {
  const distance = (a, b) => {
    let row = [...b, 0].map((_, i) => i);
    for (let i = 1; i <= a.length; i++) {
      const next = [i];
      for (let j = 1; j <= b.length; j++)
        next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] !== b[j - 1]));
      row = next;
    }
    return row[b.length];
  };
  const lower = word.toLowerCase();
  return [...words].map((name) => [distance(lower, name.toLowerCase()), name])
    .sort(([a], [b]) => a - b)[0][1];
}
