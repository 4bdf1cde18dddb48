// The sub-commands. Each adds itself to the application; its work is done in its callback, which
// throws InputError.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "layer.h"

namespace command {

void add_run_command(CLI::App *app);
void add_pack_command(CLI::App *app);
void add_verify_command(CLI::App *app);
void add_info_command(CLI::App *app);

// --weights and how to read it, what config.json says otherwise, and how it is computed.
void add_layer_options(CLI::App *app, LayerOptions *options);
CLI::Validator whole_number(int64_t most = INT64_MAX);                       // from 1
CLI::Validator one_of(const std::vector<std::string> &words, size_t count);  // of the first ones

std::string instruction_set_names();  // "scalar, avx2"

inline const char *const kInput = "Input and output", *const kComputation = "Computation";

}  // namespace command
