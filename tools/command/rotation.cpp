#include "rotation.h"

#include <cstdio>

#include "error.h"

namespace command {

Rotation::Rotation(const LayerOptions &options, const mha_layer_config &shape, int64_t num_positions, bool is_gpt_oss) {
  const int64_t dims = options.rope_dims != 0 ? options.rope_dims : shape.head_dim;
  const std::string source = options.rope_dims != 0 ? "--rope-dims" : "the width of a head";
  if (dims % 2 != 0) fail(source, ": ", dims, " elements can't be rotated in pairs; --rope-dims takes an even number");
  if (dims > shape.head_dim) fail(source, ": ", dims, " elements can't be rotated, for a head has ", shape.head_dim);

  mha_rope_config config = {};
  config.struct_size = sizeof config;
  config.dims = dims;
  config.num_positions = num_positions;
  config.base = options.rope_base != 0 ? options.rope_base : 10000.0;
  const bool is_stretched = is_gpt_oss && !wants_rope(options);
  if (is_stretched) {  // "rope_theta" and "rope_scaling" of gpt-oss-20b and gpt-oss-120b
    config.base = 150000;
    config.yarn_factor = 32;
    config.original_positions = 4096;
    config.yarn_unrounded = 1;
  }
  size_t count = 0;
  if (__builtin_mul_overflow(static_cast<size_t>(num_positions), static_cast<size_t>(dims / 2), &count)) {
    fail("--input: has too many rows to be rotated");
  }
  cos_ = std::make_unique<float[]>(count);
  sin_ = std::make_unique<float[]>(count);
  mha_error error;
  check(mha_rope_tables(&config, cos_.get(), sin_.get(), &error), error, "--rope-base");

  const bool is_interleaved = options.rope_style == "interleaved";
  rope_.struct_size = sizeof rope_;
  rope_.style = is_interleaved ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALF;
  rope_.dims = dims;
  rope_.num_positions = num_positions;
  rope_.cos = cos_.get();
  rope_.sin = sin_.get();

  char base[32];
  std::snprintf(base, sizeof base, "%.15g", config.base);
  text_ = command::text("rotated (", is_interleaved ? "interleaved" : "half", ", base ", base, is_stretched ? ", YaRN by 32" : "",
                        dims != shape.head_dim ? command::text(", ", dims, " elements") : "", ")");
}

}  // namespace command
