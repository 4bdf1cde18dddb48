// The sub-commands. Each adds itself to the application; its work is done in its callback, which throws InputError.
#pragma once

#include "cli.h"

namespace command {

void add_explain_command(CLI::App *app);
void add_run_command(CLI::App *app);
void add_pack_command(CLI::App *app);
void add_verify_command(CLI::App *app);
void add_info_command(CLI::App *app);

}  // namespace command
