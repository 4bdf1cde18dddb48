// The options that sub-commands share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli.h"

namespace command {

// Which layer, and how it is computed. 0 and "" = not given.
struct LayerOptions {
  std::string weights;
  std::string packed;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  std::optional<std::string> layer;
  std::string names;
  std::string layout;
  bool without_rope = false;
  bool can_run = false;  // whether the sub-command runs the layer: it then has the --rope options, and norms and sinks
  double rope_base = 0;
  std::string rope_style;
  int64_t rope_dims = 0;
  std::string rope_scaling;
  std::string kept_heads;
  float scale = 0;
  std::string gate;
  std::string weight_type;
  std::string arithmetic;
  std::string instruction_set;
  std::string back_end;
};

// What changes the scores, and which of them count. 0 and "" = not given.
struct AttentionOptions {
  int64_t window = 0;
  float softcap = 0;
  std::string arithmetic, context_arithmetic;
  bool has_alibi = false;
  std::string norm;
  float norm_epsilon = 0;
  bool is_norm_after_rope = false;
  bool has_norm_of_values = false;
  bool adds_groups = false;
  int64_t relative_left = 0;
  // Files
  std::string sinks, bias, mask, relative_bias, t5_bias, q_scales, head_scales, groups, key_groups, cu_seqlens, key_cu_seqlens;
  std::string lengths, key_lengths, starts;
};

// What goes into the layer.
struct InputOptions {
  std::string query;
  std::string key;
  std::string value;
  bool is_causal = false;
};

// The groups of options in --help.
inline const char *const kWeights = "Weights";
inline const char *const kAttention = "Attention";
inline const char *const kInput = "Input and output";
inline const char *const kComputation = "Computation";

void add_weight_options(CLI::App *app, LayerOptions *options);  // --weights and how to read it
void add_rope_options(CLI::App *app, LayerOptions *options);    // how queries and keys are rotated, with --packed too
void add_packed_option(CLI::App *app, LayerOptions *options);   // --packed, instead of all of them
void add_weight_type_option(CLI::App *app, LayerOptions *options);
void add_output_type_option(CLI::App *app, std::string *type);
void add_back_end_option(CLI::App *app, LayerOptions *options);
void add_instruction_set_option(CLI::App *app, LayerOptions *options);
void add_attention_options(CLI::App *app, AttentionOptions *options);
void add_padding_options(CLI::App *app, AttentionOptions *options);  // rows that are none
void add_kept_heads_option(CLI::App *app, LayerOptions *options);
void add_input_options(CLI::App *app, InputOptions *options);  // --input and company

// All files that are read, as check_output wants them.
std::vector<std::pair<const char *, std::string>> files_of(const LayerOptions &layer, const InputOptions &inputs,
                                                           const AttentionOptions &attention);

// Throws one InputError that names all options that are needed and not given. others: {"--input", its value}.
void check_needed(const LayerOptions &options, bool may_be_packed, const std::vector<std::pair<const char *, std::string>> &others);

// The MHA_TYPE_* of a name that type_name checks; of "" MHA_TYPE_F32.
uint32_t type_of(const std::string &name);

// Whether one of the --rope options is given.
bool wants_rope(const LayerOptions &options);

CLI::Validator finite_number();
CLI::Validator positive_number();
CLI::Validator whole_number(int64_t most = INT64_MAX);  // from 1
CLI::Validator type_name(uint32_t last);  // of MHA_TYPE_F32 to this one
CLI::Validator one_of(const std::string &first, const std::string &second);

}  // namespace command
