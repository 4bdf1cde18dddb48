// mha for JavaScript. The options are those of the C structs, in camel case (options.d.ts).
import type {
  AttentionArgs, CallInfo, CausalConvArgs, ChooseKeysArgs, ForwardArgs, KvCacheConfig,
  LayerConfig, LayerOptions, LayerWeights, LinearArgs, LinearWeights, RecurrentArgs, Rope,
  RopeConfig,
} from './options.js';
export * from './options.js';

type Typed =
  | Float32Array | Float64Array | Uint8Array | Int8Array | Uint16Array | Int32Array | BigInt64Array;
type Constructor<T extends Typed> = {
  readonly BYTES_PER_ELEMENT: number;
  new (buffer: ArrayBuffer, at: number, length: number): T;
};
export type Floats = Float32Array | Block<Float32Array> | readonly number[];
export type Doubles = Float64Array | Block<Float64Array> | readonly number[];
export type Bytes = Uint8Array | Block<Uint8Array> | readonly (boolean | number)[];
/** Of 64 or of 32 bits, as the C struct has them; numbers are converted. */
export type Integers =
  | BigInt64Array | Int32Array | Block<BigInt64Array> | Block<Int32Array> | readonly number[];
/** From neighbour to neighbour, in elements; 'broadcast': one copy serves all. */
export type Strides = { [axis in 'batch' | 'row' | 'head']?: number | 'broadcast' };
type Data = Floats | Uint16Array | Block<Uint16Array>;
/** Rows of numbers; those of f16 (but not in a Float16Array) and of bf16 need the type. */
export type Rows = Data | { data: true | Data; type?: 'f32' | 'f16' | 'bf16'; strides?: Strides };
type Weights = Data | Int8Array | Uint8Array | Block<Int8Array> | Block<Uint8Array>;
export type Matrix = Weights | {
  data?: Weights; bias?: Floats; scales?: Floats; offsets?: Floats;
  blockScales?: Floats; blockOffsets?: Floats;
};
type Optional = 'lse' | 'partials' | 'q' | 'k' | 'v' | 'context' | 'scores' | 'scaledScores' |
  'softcappedScores' | 'maskedScores' | 'attentionWeights';
/** Arrays that a call wrote, by name: new ones, or those that were given to be written to. Where
 * blocks or other types of rows were given, say so: forward<Block<Float32Array>>(...). */
export type Results<Output> = { output: Output } & { [name in Optional]: Float32Array };

/** What lives in the module's memory. Use after dispose() is an error. */
interface Owned extends Disposable {
  dispose(): void;
}

export interface Layer extends Owned {
  readonly shape: Required<LayerConfig>;
  readonly bytes: number;
  forward<Output = Float32Array>(options: ForwardArgs): Results<Output>;
  forwardInfo(options: ForwardArgs): CallInfo;
  linear<Output = Float32Array>(options: LinearArgs): { output: Output };
  /** The packed weights, which `layerView` takes, here and on every machine. */
  save(): Uint8Array;
}

export interface KvCache extends Owned {
  readonly shape: Required<KvCacheConfig>;
  readonly bytes: number;
  length(sequence?: number): number;
  truncate(sequence: number, length: number): void;
  copyPrefix(from: number, to: number, length: number): void;
  setBlocks(sequence: number, blocks: Int32Array | readonly number[]): void;
  /** Whether `block` took the place of a block that sequences share. */
  unshare(sequence: number, block?: number): boolean;
  append(sequence: number, rows: { k: Floats; v?: Floats }): void;
  read(sequence: number, first: number, count: number): { k: Float32Array; v: Float32Array };
  save(): Uint8Array;
}

/** An array in the module's memory, which calls read and write without a copy. */
export interface Block<T extends Typed> extends Owned {
  readonly length: number;
  /** The elements. When the memory grows, which any call may do, this array loses them: take the
   * view again. After dispose() it must not be used. */
  readonly view: T;
}

export interface Engine {
  readonly version: string;
  readonly contract: number;
  readonly instructionSet: string;
  /** Bytes of the module's memory, which never shrinks, and bytes in use. */
  readonly memoryBytes: number;
  readonly usedBytes: number;
  alloc<T extends Typed>(type: Constructor<T>, length: number): Block<T>;
  layer(options: LayerConfig & LayerWeights & LayerOptions): Layer;
  linear(options: LinearWeights & LayerOptions): Layer;
  layerView(bytes: Uint8Array, options?: LayerOptions): Layer;
  kvCache(options: KvCacheConfig): KvCache;
  kvCacheView(bytes: Uint8Array): KvCache;
  attention<Output = Float32Array>(options: AttentionArgs): Results<Output>;
  attentionInfo(options: AttentionArgs): CallInfo;
  chooseKeys(options: ChooseKeysArgs): { chosenKeys: Int32Array; indexScores: Float32Array };
  recurrentAttention<Output = Float32Array>(options: RecurrentArgs):
    { output: Output; stateOut: Float32Array; snapshots: Float32Array };
  causalConv<Output = Float32Array>(options: CausalConvArgs):
    { output: Output; stateOut: Float32Array };
  /** A rotation for the option `rope`, with tables in the module's memory. */
  ropeTables(options: RopeConfig): Rope;
  alibiSlopes(numHeads: number): Float32Array;
}

export interface LoadOptions {
  /** Of the module, where a bundler does not find it beside mha.js. */
  url?: string | URL;
  module?: WebAssembly.Module;
  /** More is refused before anything is allocated. Less than 4 GiB. */
  maxBytes?: number;
}

/** Whether the engine has relaxed SIMD, which mha.wasm needs. */
export const hasRelaxedSimd: boolean;

/** Instantiates the library. Each instance has memory of its own. */
export function load(options?: LoadOptions): Promise<Engine>;

/** `message` is the C library's, and `status` such as "MHA_ERROR_SHAPE". */
export class MhaError extends Error {
  readonly status: string;
}
