// Checks of mha_forward, mha_attention, mha_choose_keys and mha_linear, in this order. Each entry
// has counts and arrays that the others lack; what they share is in request.cpp.

#include "entries.h"

#include "../base/structs.h"
#include "../plan/rows.h"
#include "../storage.h"
#include "arrays.h"
#include "cache.h"
#include "layer.h"
#include "request.h"
#include "rules.h"

namespace mha {
namespace {

// sgemm takes strides as int, and none of 0.
mha_status check_sgemm_rows(Report report, const char *name, int64_t row_stride) {
  if (row_stride == 0)
    return report.invalid(
        "%s.strides.row is MHA_BROADCAST, which sgemm does not support; copy the rows", name);
  if (row_stride <= INT32_MAX) return MHA_OK;
  return report.too_large("%s.strides.row is %lld; the largest that sgemm supports is %d", name,
                          lld(row_stride), INT32_MAX);
}

// With cache_read, no keys come with the call. given: the name of an array of them.
mha_status leave_out_keys(Report report, const char *given, mha_call *call) {
  call->n_kv = 0;
  if (!given) return MHA_OK;
  return report.invalid(
      "%s.data is given, but no keys come with cache_read; set it to NULL, or give cache to append",
      given);
}

// ---- mha_forward

// NULL inputs mean key = query and value = key. Then the widths have to agree, and without key
// there are as many keys as queries. With cache_read the call brings no keys at all.
mha_status resolve_inputs(Report report, const LayerShape &shape, mha_forward_args *args) {
  const bool has_key = args->key.data != nullptr, has_value = args->value.data != nullptr;
  MHA_TRY(check_one_cache(report, args->call.cache, args->call.cache_read));
  if (shape.only_asks() && !args->call.cache_read)
    return report.invalid(
        "cache_read is NULL, but the layer has no W_K and W_V, so it can only attend to a cache; "
        "give cache_read");
  if (args->call.cache_read)
    return leave_out_keys(report, has_key ? "key" : has_value ? "value" : nullptr, &args->call);
  if (!has_key && shape.key_dim != shape.query_dim)
    return report.shape("key.data is NULL, but key_dim %lld is not query_dim %lld; give key",
                        lld(shape.key_dim), lld(shape.query_dim));
  if (!has_value && shape.value_dim != shape.key_dim)
    return report.shape("value.data is NULL, but value_dim %lld is not key_dim %lld; give value",
                        lld(shape.value_dim), lld(shape.key_dim));
  if (!has_key && !has_value) {
    args->call.n_kv = args->call.n_q;
    return MHA_OK;
  }
  MHA_TRY(
      resolve_extent(report, "n_kv", "the rows of key and value per sequence", &args->call.n_kv));
  if (!has_key && args->call.n_kv != args->call.n_q)
    return report.shape(
        "n_kv is %lld, but key.data is NULL, so that the keys are the n_q = %lld rows of query; "
        "give key",
        lld(args->call.n_kv), lld(args->call.n_q));
  return MHA_OK;
}

}  // namespace

mha_status check_forward(Report report, const mha_layer *layer, const mha_forward_args *given,
                         mha_forward_args *read) {
  MHA_TRY(check_layer(report.about(layer_argument), layer));
  mha_forward_args &args = *read;
  const LayerShape &shape = layer->shape;
  if (!shape.has_heads())
    return report.about(layer_argument)
        .invalid(
            "layer is a linear layer, which has no heads; call mha_linear, or create it with "
            "mha_layer_create");
  MHA_TRY(read_struct(report, "mha_forward_args", given, &args));
  MHA_TRY(resolve_batch(report, &args.call.batch));
  MHA_TRY(resolve_extent(report, "n_q", "the rows of query per sequence", &args.call.n_q));
  MHA_TRY(resolve_inputs(report, shape, &args));
  MHA_TRY(each_array(*layer, args, ResolveArrays{report}));
  MHA_TRY(check_type(report, "key", args.key, "query", args.query.type));
  MHA_TRY(check_type(report, "value", args.value, "query", args.query.type));
  return check_scheduler(report, args.call.scheduler);
}

// Projections are float32, whatever the types of the inputs. Without a cache they write keys and
// values in the packed form.
mha_status check_forward_request(Report report, const LayerShape &layer, const mha_call &call,
                                 const mha_outputs &outputs, SequenceArguments *sequences,
                                 AttentionRequest *request) {
  const mha_kv_cache *const cache = sequences->cache;
  request->num_heads = layer.num_heads;
  request->num_kv_heads = layer.num_kv_heads;
  request->head_dim = layer.head_dim;
  request->head_dim_v = layer.head_dim_v;
  request->scale = layer.scale;
  request->most_queries = 0;
  request->k = cache ? cached_keys(*sequences) : KeyValues{};
  request->v = cache ? cached_values(*sequences) : KeyValues{};
  if (!cache) request->k.is_packed = request->v.is_packed = true;
  request->is_in_integers = call.attention_arithmetic != MHA_ARITHMETIC_F32;
  if (!cache && request->is_in_integers) request->k = request->v = packed_codes();
  if (call.cache && is_stored(request->k))
    return report.invalid(
        "cache has MHA_CACHE_VALUES_IN_KEYS, but the layer projects values; give cache_read, or "
        "append with mha_attention");
  if (outputs.partials)
    return report.invalid(
        "outputs.partials is given, but only mha_attention computes it; set it to NULL");
  const RequestRows rows = {Storage::f32, Storage::f32, Storage::f32, layer.has_output != 0, true};
  return check_request(report, call, rows, outputs, sequences, request);
}

mha_status check_sgemm_inputs(Report report, const mha_layer &layer, const mha_forward_args &args) {
  if (!layer.sgemm) return MHA_OK;
  MHA_TRY(check_sgemm_rows(report, "query", args.query.strides.row));
  if (args.key.data) MHA_TRY(check_sgemm_rows(report, "key", args.key.strides.row));
  return args.value.data ? check_sgemm_rows(report, "value", args.value.strides.row) : MHA_OK;
}

// ---- mha_attention

namespace {

// Heads and widths. An int must hold every number of columns.
mha_status check_dimensions(Report report, mha_attention_args *args) {
  const Rules rules = {report};
  MHA_TRY(check_fields(rules, *args));
  if (args->num_kv_heads == 0) args->num_kv_heads = args->num_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  MHA_TRY(rules.divides("num_kv_heads", args->num_kv_heads, "num_heads", args->num_heads));
  if (args->num_heads * args->head_dim > INT32_MAX ||
      args->num_heads * args->head_dim_v > INT32_MAX) {
    return report.too_large("num_heads %lld * head_dim (or * head_dim_v) is larger than %d",
                            lld(args->num_heads), INT32_MAX);
  }
  return MHA_OK;
}

mha_status check_cache_read(Report report, mha_attention_args *args) {
  MHA_TRY(check_one_cache(report, args->call.cache, args->call.cache_read));
  if (!args->call.cache_read)
    return resolve_extent(report, "n_kv", "the rows of k and v per sequence", &args->call.n_kv);
  return leave_out_keys(report, args->k.data ? "k" : args->v.data ? "v" : nullptr, &args->call);
}

mha_status check_attention_shape(Report report, mha_attention_args *args) {
  MHA_TRY(resolve_batch(report, &args->call.batch));
  MHA_TRY(resolve_extent(report, "n_q", "the rows of q per sequence", &args->call.n_q));
  MHA_TRY(check_cache_read(report, args));
  return check_dimensions(report, args);
}

mha_status check_attention_arrays(Report report, const mha_outputs &outputs,
                                  mha_attention_args *read) {
  mha_attention_args &args = *read;
  if (outputs.partials && !is_contiguous(args.output.strides))
    return report.invalid(
        "output.strides are set beside outputs.partials, which are written in place of output; set "
        "them to 0");
  MHA_TRY(each_array(args, true, ResolveArrays{report}));
  if (args.scale != 0.0f && (args.call.flags & MHA_EQUAL_SCORES))
    return report.invalid("scale is %g beside MHA_EQUAL_SCORES, which makes it 0; leave one out",
                          static_cast<double>(args.scale));
  return check_scheduler(report, args.call.scheduler);
}

// Partials take the place of finished outputs, and some outputs exist only where the layer projects
// queries, keys and values.
mha_status check_attention_outputs(Report report, const mha_attention_args &args,
                                   const mha_outputs &outputs, const AttentionRequest &request) {
  if (const char *const of_forward = outputs.q ? "q" : outputs.k ? "k" : outputs.v ? "v" : nullptr)
    return report.invalid("outputs.%s is given, but only mha_forward computes it; set it to NULL",
                          of_forward);
  if (!outputs.partials) return MHA_OK;
  const char *const other = args.output.data              ? "output.data"
                            : args.output.type != 0       ? "output.type"
                            : outputs.lse                 ? "outputs.lse"
                            : outputs.context             ? "outputs.context"
                            : request.pairs.has_any()     ? "an output per pair"
                            : request.options.sinks       ? "score.sinks"
                            : request.options.head_scales ? "score.head_scales"
                                                          : nullptr;
  if (!other) return MHA_OK;
  return report.invalid(
      "%s is given beside outputs.partials; leave it out, and give it to mha_partials_finish",
      other);
}

// Without a cache, units read keys and values in the arrays of the caller.
RequestRows describe_rows(const mha_attention_args &args, const AttentionUse &use,
                          const SequenceArguments &sequences, AttentionRequest *request) {
  const mha_kv_cache *const cache = sequences.cache;
  const StridedRows k = rows_of(args.k), v = rows_of(args.v);
  request->num_heads = args.num_heads;
  request->num_kv_heads = args.num_kv_heads;
  request->head_dim = args.head_dim;
  request->head_dim_v = args.head_dim_v;
  request->scale =
      args.scale != 0.0f ? args.scale : 1.0f / MHA_SQRTF(static_cast<float>(args.head_dim));
  request->most_queries = use.most_queries;
  request->is_in_integers = args.call.attention_arithmetic != MHA_ARITHMETIC_F32;
  const bool packs_rows = request->is_in_integers && !cache;
  request->k = cache ? cached_keys(sequences) : packs_rows ? packed_codes() : plain_rows(k);
  request->v = cache ? cached_values(sequences) : packs_rows ? packed_codes() : plain_rows(v);
  const bool stores_rows = packs_rows || (cache && args.call.n_kv > 0);
  return {storage_of_type(args.q.type), stores_rows ? k.storage : Storage::f32,
          stores_rows ? v.storage : Storage::f32, false, use.has_values};
}

}  // namespace

// The order matters: the shape comes first, because sequences and arrays depend on it, and the
// request last, because it depends on all of them.
mha_status check_attention(Report report, const AttentionUse &use, mha_attention_args *args,
                           SequenceArguments *sequences, mha_outputs *outputs,
                           AttentionRequest *request) {
  MHA_TRY(check_attention_shape(report, args));
  MHA_TRY(read_call(report, args->call, false, args->kv_first_position, sequences, outputs));
  MHA_TRY(check_attention_arrays(report, *outputs, args));
  const RequestRows rows = describe_rows(*args, use, *sequences, request);
  MHA_TRY(check_request(report, args->call, rows, *outputs, sequences, request));
  return check_attention_outputs(report, *args, *outputs, *request);
}

// ---- mha_choose_keys

namespace {

// mha_choose_keys takes the arguments of mha_attention for queries, keys and sequences. Everything
// that serves values, the softmax or outputs has no meaning there.
mha_status check_left_out(Report report, const mha_attention_args &args) {
  const struct {
    const char *name;
    const void *given;
  } arrays[] = {{"v.data", args.v.data},
                {"output.data", args.output.data},
                {"score", args.call.score},
                {"score_arrays", args.call.score_arrays},
                {"outputs", args.call.outputs}};
  if (args.call.attention_arithmetic != MHA_ARITHMETIC_F32 && !args.call.cache &&
      !args.call.cache_read)
    return report.invalid(
        "attention.call.attention_arithmetic is %u, but the keys are in no cache; give a cache of "
        "MHA_TYPE_INT8 (4), or set it to MHA_ARITHMETIC_F32 (0)",
        args.call.attention_arithmetic);
  for (const auto &array : arrays) {
    if (array.given)
      return report.invalid(
          "attention.%s is given, but mha_choose_keys does not use it; set it to NULL", array.name);
  }
  if (args.kv_first_position != 0)
    return report.invalid(
        "attention.kv_first_position is %lld, but all keys to choose from are the call's; set it "
        "to 0",
        lld(args.kv_first_position));
  if (args.num_kv_heads < 0 || args.num_kv_heads > 1)
    return report.shape(
        "attention.num_kv_heads is %lld, but index heads share one key head; set it to 1",
        lld(args.num_kv_heads));
  const mha_kv_cache *const caches[] = {args.call.cache, args.call.cache_read};
  for (const mha_kv_cache *cache : caches) {
    MHA_TRY(check_optional_cache(report, cache));
    if (cache && cache->kind == MHA_CACHE_KIND_RING)
      return report.invalid(
          "attention.call.cache is a ring, which forgets keys that could be chosen; use a "
          "contiguous or paged cache");
  }
  return MHA_OK;
}

}  // namespace

// Index heads share one key head. Their values are not read, but the cache has a width for them,
// which must agree.
mha_status check_choice(Report report, const mha_choose_keys_args *given,
                        mha_choose_keys_args *args, mha_attention_args *attention) {
  MHA_TRY(read_struct(report, "mha_choose_keys_args", given, args));
  MHA_TRY(Rules{report}.given("attention", args->attention, "the arguments of the attention"));
  MHA_TRY(read_struct(report, "mha_attention_args", args->attention, attention));
  MHA_TRY(check_left_out(report, *attention));
  attention->num_kv_heads = 1;
  const mha_kv_cache *const cache =
      attention->call.cache ? attention->call.cache : attention->call.cache_read;
  attention->head_dim_v = cache ? cache->head_dim_v : 0;
  return MHA_OK;
}

mha_status check_choice_arrays(Report report, const mha_attention_args &attention,
                               const AttentionRequest &request, int64_t n_kv,
                               mha_choose_keys_args *args) {
  if (attention.call.cache && attention.call.n_kv > 0 &&
      attention.call.cache->value_place == MHA_CACHE_VALUES_OWN)
    return report.invalid(
        "attention.call.cache stores values, but only keys are appended; use a cache with "
        "MHA_CACHE_VALUES_IN_KEYS, or give cache_read");
  if (request.prepare_v.norm.is_given)
    return report.invalid(
        "attention.call.norm has MHA_NORM_VALUES, but mha_choose_keys uses no values; leave the "
        "flag out");
  const Rules rules = {report};
  MHA_TRY(check_fields(rules, *args));
  if (n_kv > INT32_MAX)
    return report.too_large(
        "there may be %lld keys, but an entry of chosen_keys can name only the first 2^31 - 1",
        lld(n_kv));
  if (storage_of_type(args->weights.type) != Storage::f32)
    return report.invalid("weights.type is %u; it must be 0 or MHA_TYPE_F32 (1)",
                          args->weights.type);
  const Extents of_weights = {attention.call.batch, request.n_q, no_extent, request.num_heads};
  MHA_TRY(resolve_array(report, "weights", of_weights, &args->weights));
  const Count rows = Count(attention.call.batch) * Count(request.n_q);
  MHA_TRY(rules.fits("chosen_keys", rows * Count(args->num_chosen) * Count(sizeof(int32_t))));
  if (args->index_scores)
    MHA_TRY(rules.fits("index_scores", rows * Count(n_kv) * Count(sizeof(float))));
  return MHA_OK;
}

// ---- mha_linear

// The residual has the shape of the output, and its type unless it says otherwise.
mha_status check_linear(Report report, const mha_layer *layer, const mha_linear_args *given,
                        mha_linear_args *read) {
  MHA_TRY(check_layer(report.about(layer_argument), layer));
  const LayerShape &shape = layer->shape;
  if (!shape.has_output)
    return report.about(layer_argument)
        .invalid(
            "layer has no W_O, which mha_linear multiplies by; create it with w_o, or with "
            "mha_linear_create");
  mha_linear_args &args = *read;
  MHA_TRY(read_struct(report, "mha_linear_args", given, &args));
  MHA_TRY(resolve_extent(report, "rows", "the rows of x", &args.rows));
  MHA_TRY(each_array(*layer, args, ResolveArrays{report}));
  MHA_TRY(check_type(report, "residual", args.residual, "output", args.output.type));
  MHA_TRY(check_scheduler(report, args.scheduler));
  return layer->sgemm ? check_sgemm_rows(report, "x", args.x.strides.row) : MHA_OK;
}

}  // namespace mha
