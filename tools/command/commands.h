// The sub-commands. Each adds itself to the application. When it is chosen, it sets the task, which
// throws InputError and is done after parsing: the parser needs memory behind its callbacks.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "layer.h"

namespace command {

using Task = std::function<void()>;
void add_run_command(CLI::App *app, Task *task);
void add_pack_command(CLI::App *app, Task *task);
void add_verify_command(CLI::App *app, Task *task);
void add_info_command(CLI::App *app, Task *task);

// --weights and how to read it, what config.json says otherwise, and how it is computed.
void add_layer_options(CLI::App *app, LayerOptions *options);
CLI::Validator whole_number(int64_t most = INT64_MAX);                       // from 1
CLI::Validator one_of(const std::vector<std::string> &words, size_t count);  // of the first ones

std::string instruction_set_names();  // "scalar, avx2"

inline const char *const kInput = "Input and output", *const kComputation = "Computation";

}  // namespace command
