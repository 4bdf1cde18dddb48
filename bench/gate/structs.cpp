#include "structs.h"

#include <mha.h>

#include <cstring>
#include <type_traits>

// Compiled as structs<0>, structs<1> and so on. It names fields of every version that the gate may
// compare: MHA_CAUSAL, MHA_EQUAL_SCORES and MHA_INIT tell the structs since d596f14, since 0e7660a
// and since 0.1.0 from those before them.
#ifndef MHA_FUNCTION_SIGMOID
#define MHA_FUNCTION_SIGMOID MHA_GATE_SIGMOID
#endif

namespace gate {
namespace {

template <class T>
T *start(Struct *memory) {
  static_assert(sizeof(T) <= sizeof memory->bytes, "a struct of mha.h has outgrown Struct");
  memset(memory->bytes, 0, sizeof memory->bytes);
  T *const filled = reinterpret_cast<T *>(memory->bytes);
  filled->struct_size = sizeof(T);
  return filled;
}

// An array of a call: a pointer, or since 0.1.0 a struct that begins with one.
template <class Array, class Float>
void set(Array *array, Float *data) {
  if constexpr (std::is_pointer_v<Array>) {
    *array = data;
  } else {
    array->data = data;
  }
}

// The fields that mha_forward_args and mha_attention_args have in common.
#ifdef MHA_INIT
template <class Args>
mha_call *call_of(Args *args) {
  return &args->call;
}
#else
template <class Args>
Args *call_of(Args *args) {
  return args;
}
#endif

template <class Args>
Args *start_call(const Shape &shape, const mha_scheduler *scheduler, Struct *memory) {
  Args *const args = start<Args>(memory);
  call_of(args)->batch = shape.batch;
  call_of(args)->n_q = shape.n;
#ifdef MHA_CAUSAL
  call_of(args)->flags = shape.is_causal ? MHA_CAUSAL : 0;
#else
  args->is_causal = static_cast<uint32_t>(shape.is_causal);
#endif
  call_of(args)->scheduler = scheduler;
  return args;
}

bool fill_layer(const Shape &shape, const float *w_qkv, const float *w_o, Struct *config_memory,
                Struct *weights_memory, Struct *options_memory) {
  mha_layer_config *const config = start<mha_layer_config>(config_memory);
  config->query_dim = shape.width;
  config->num_heads = shape.heads;
  config->num_kv_heads = shape.kv_heads;
  config->head_dim = shape.head_dim;
  mha_layer_weights *const weights = start<mha_layer_weights>(weights_memory);
  set(&weights->w_qkv, w_qkv);
  set(&weights->w_o, w_o);
  start<mha_layer_options>(options_memory)->instruction_set = shape.instruction_set;
#ifdef MHA_ARITHMETIC_INT8
#ifdef MHA_INIT
  mha_weight_format &format = config->format;
  uint32_t &type = format.type;
#else
  mha_layer_config &format = *config;
  uint32_t &type = format.weight_type;
#endif
  if (shape.weight_type) type = MHA_TYPE_F32 + shape.weight_type;
  if (shape.arithmetic) format.arithmetic = MHA_ARITHMETIC_INT8 - 1 + shape.arithmetic;
  return true;
#else
  return !shape.weight_type && !shape.arithmetic;
#endif
}

void fill_forward(const Shape &shape, const float *query, float *output,
                  const mha_scheduler *scheduler, Struct *memory) {
  mha_forward_args *const args = start_call<mha_forward_args>(shape, scheduler, memory);
  set(&args->query, query);
  set(&args->output, output);
}

void fill_attention(const Shape &shape, const float *q, const float *k, const float *v,
                    float *output, const mha_scheduler *scheduler, Struct *memory) {
  mha_attention_args *const args = start_call<mha_attention_args>(shape, scheduler, memory);
  args->num_heads = shape.heads;
  args->num_kv_heads = shape.kv_heads;
  args->head_dim = shape.head_dim;
  set(&args->q, q);
  if (!shape.past) {
    call_of(args)->n_kv = shape.n_kv;
    set(&args->k, k);
    set(&args->v, v);
  }
  set(&args->output, output);
  args->instruction_set = shape.instruction_set;
}

#ifdef MHA_RECURRENT_H
// Gates and decay are some of the numbers of the other arrays.
bool fill_recurrent(const Shape &shape, const float *q, const float *k, const float *v,
                    float *output, const mha_scheduler *scheduler, Struct *memory) {
  mha_recurrent_args *const args = start<mha_recurrent_args>(memory);
  args->num_v_heads = shape.heads;
  args->head_dim = shape.head_dim;
  args->norm_epsilon = 1e-6f;
  args->a_log = k;
  args->beta_function = MHA_FUNCTION_SIGMOID;
  args->instruction_set = shape.instruction_set;
  args->scheduler = scheduler;
  args->batch = shape.batch;
  args->rows = shape.n;
  args->q.data = args->beta.data = q;
  args->k.data = k;
  args->v.data = args->decay.data = v;
  args->output.data = output;
  return true;
}
#else
constexpr auto fill_recurrent = [](auto...) { return false; };
#endif

void fill_cache(const Shape &shape, Struct *memory) {
  mha_kv_cache_config *const config = start<mha_kv_cache_config>(memory);
  config->num_sequences = shape.batch;
  config->capacity = shape.past + shape.n;
  config->num_kv_heads = shape.kv_heads;
  config->head_dim = shape.head_dim;
  config->k_type = config->v_type = MHA_TYPE_F32 + shape.kv_type;
}

void set_cache(const Shape &shape, mha_kv_cache *cache, Struct *memory) {
  if (shape.is_layer) {
    call_of(reinterpret_cast<mha_forward_args *>(memory->bytes))->cache = cache;
    return;
  }
  mha_attention_args *const args = reinterpret_cast<mha_attention_args *>(memory->bytes);
#ifdef MHA_EQUAL_SCORES
  call_of(args)->cache_read = cache;
#else
  args->cache = cache;
#ifdef MHA_CAUSAL  // and before, n_kv = 0 says it
  args->flags |= MHA_CACHE_READ;
#endif
#endif
}

}  // namespace

template <>
Structs structs<MHA_GATE_LIBRARY>() {
  return {fill_layer, fill_cache, fill_forward, fill_attention, fill_recurrent, set_cache};
}

}  // namespace gate
