#include "inputs.h"

#include "error.h"

namespace command {
namespace {

void check_same_kind(const Array &other, const Array &query) {
  if (other.type != query.type) fail(other.name, ": holds numbers of another type than ", query.name);
  if (other.shape.size() == query.shape.size() && other.batch() == query.batch()) return;
  fail(other.name, ": has the shape ", shape_text(other.shape), ", which is another batch than that of ", query.name, ", ",
       shape_text(query.shape));
}

void check_width(const Array &rows, int64_t expected, const char *what, const std::string &layer_name) {
  if (rows.width() == expected) return;
  fail(rows.name, ": has rows of ", rows.width(), ", but the layer of ", layer_name, " takes ", what, " rows of ", expected);
}

}  // namespace

int64_t CallInputs::n_kv() const { return key ? key->rows() : value ? value->rows() : query.rows(); }

mha_forward_args CallInputs::arguments(int64_t first, int64_t count) const {
  const auto from_first = [first](const Array &rows) { return rows.from(first * rows.rows() * rows.width()); };
  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.batch = count;
  args.n_q = n_q();
  args.n_kv = n_kv();
  args.query = from_first(query);
  args.input_type = query.type;
  if (key) args.key = from_first(*key);
  if (value) args.value = from_first(*value);
  args.flags = is_causal ? MHA_CAUSAL : 0;
  return args;
}

CallInputs read_inputs(const InputOptions &options) {
  CallInputs inputs;
  inputs.query = read_npy(options.query, Elements::kRows);
  inputs.is_causal = options.is_causal;
  if (!options.key.empty()) {
    inputs.key = read_npy(options.key, Elements::kRows);
    check_same_kind(*inputs.key, inputs.query);
  }
  if (!options.value.empty()) {
    inputs.value = read_npy(options.value, Elements::kRows);
    check_same_kind(*inputs.value, inputs.query);
    const Array &key = inputs.key ? *inputs.key : inputs.query;
    if (inputs.value->rows() != key.rows()) {
      fail(inputs.value->name, ": has ", count_text(inputs.value->rows(), "row"), ", but the keys of ", key.name, " have ", key.rows());
    }
  }
  if (inputs.is_causal && inputs.n_q() > inputs.n_kv()) {
    fail(inputs.query.name, ": has ", count_text(inputs.n_q(), "row"), ", more than the ", count_text(inputs.n_kv(), "key"),
         "; with --causal the last row stands at the last key");
  }
  return inputs;
}

void check_widths(const CallInputs &inputs, const mha_layer_config &layer, const std::string &layer_name, const std::string &layout_doubt) {
  if (!layout_doubt.empty() && !inputs.key && !inputs.value) fail(layout_doubt);
  const Array &key = inputs.key ? *inputs.key : inputs.query;
  check_width(inputs.query, layer.query_dim, "query", layer_name);
  check_width(key, layer.key_dim, "key", layer_name);
  check_width(inputs.value ? *inputs.value : key, layer.value_dim, "value", layer_name);
}

}  // namespace command
