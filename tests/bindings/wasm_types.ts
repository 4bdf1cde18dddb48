// What TypeScript accepts and refuses of mha-wasm.
import { load, MhaError, type Engine } from 'mha-wasm';
const mha: Engine = await load({ maxBytes: 2 ** 30 });
const x = new Float32Array(32), block = mha.alloc(Float32Array, 32);
using layer = mha.layer({ queryDim: 8, numHeads: 2, wQkv: x, wO: { data: x, bias: x },
  format: { type: 'int8', arithmetic: 'int8' } });
layer.forward({ query: block, causal: true, windowLeft: 3, score: { softcap: 3 } }).output.fill(0);
const given = layer.forward<typeof block>({ query: x, output: block, outputs: { lse: true } });
given.output.view[0] = given.lse[0];
const rope = mha.ropeTables({ dims: 4, numPositions: 2 });
const q = { data: new Uint16Array(4), type: 'f16' } as const;
mha.attention({ q, k: x, v: x, numHeads: 1, headDim: 4, rope });
// @ts-expect-error: no such option
layer.forward({ query: x, casual: true });
// @ts-expect-error: no such word
mha.layer({ queryDim: 8, numHeads: 2, format: { type: 'int7' } });
// @ts-expect-error: the query is needed
layer.forward({ causal: true });
export const isOfMha = (error: unknown) => error instanceof MhaError && error.status;
