// mha: multi-head attention on the command line.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "commands.h"
#include "error.h"
#include "mha.h"

namespace command {
namespace {

constexpr int kFailure = 1, kBadInput = 2;  // neither the user's fault nor his to mend; else

// Allocates nothing: there may be no memory.
int complain(int status, std::string_view sentence) {
  std::fputs("mha: ", stderr);
  for (size_t i = 0; i < sentence.size(); ++i) std::fputc(shown(sentence, i), stderr);
  std::fputc('\n', stderr);
  return status;
}

int complain_about_memory() { return complain(kFailure, "there is not enough memory for this"); }

// A JSON document asks for memory to release what it has; if there is none, its destructor ends the
// program.
[[noreturn]] void terminate() {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc &) {
    remove_temporary();
    std::_Exit(complain_about_memory());
  } catch (...) {
  }
  std::abort();
}

std::string version_text() {
  const uint32_t version = mha_version();
  return text("mha ", version / 10000, ".", version / 100 % 100, ".", version % 100, " (contract ",
              mha_contract(), ")");
}

int parse_and_run(int argc, char **argv) {
  CLI::App app("Computes multi-head attention on CPUs: runs layers on files, and packs them.",
               "mha");
  app.get_formatter()->column_width(24);
  app.set_version_flag("--version", version_text, "Print the version and exit");
  app.footer(R"(
Examples:
  mha info
  mha run --weights layer.safetensors --heads 12 --causal --input x.npy --output y.npy
  mha run --help

Exit status: 0 on success, 2 for wrong input or usage (with a one-line message), 1 otherwise.
`python -m mha explain` shows what each step of a layer computes.)");
  app.require_subcommand(0, 1);
  Task task;
  add_run_command(&app, &task);
  add_pack_command(&app, &task);
  add_verify_command(&app, &task);
  add_info_command(&app, &task);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success &request) {  // --help and --version
    return app.exit(request);
  } catch (const CLI::ParseError &error) {
    return complain(kBadInput, text(error.what(), "; see mha --help"));
  }
  if (!task) return complain(kBadInput, "run, pack, verify or info is expected; see mha --help");
  task();
  return 0;
}

}  // namespace

CLI::Validator whole_number(int64_t most) {
  const auto check = [most](std::string &words) -> std::string {
    const bool is_number = !words.empty() && words.size() <= 18 &&
                           words.find_first_not_of("0123456789") == std::string::npos;
    if (is_number && std::stoll(words) >= 1 && std::stoll(words) <= most) return "";
    return text("a whole number ", most == INT64_MAX ? "of at least 1" : text("from 1 to ", most),
                " is expected, not ", in_quotes(words));
  };
  return CLI::Validator(check, "");
}

CLI::Validator one_of(const std::vector<std::string> &words, size_t count) {
  const auto check = [words, count](std::string &given) -> std::string {
    std::string all;
    for (size_t i = 0; i < count; ++i) {
      if (given == words[i]) return "";
      all += (i == 0 ? "" : i + 1 < count ? ", " : " or ") + words[i];
    }
    return all + " is expected, not " + in_quotes(given);
  };
  return CLI::Validator(check, "");
}

void add_layer_options(CLI::App *app, LayerOptions *options) {
  const char *group = "Weights";
  const auto add = [&](const char *name, auto *value, const char *type, const char *description) {
    return app->add_option(name, *value, description)->type_name(type)->group(group);
  };
  const auto add_flag = [&](const char *name, auto *value, const char *text) {
    app->add_flag(name, *value, text)->group(group);
  };
  add("--weights", &options->weights, "FILE",
      "The weights of a layer or a whole model (.safetensors, or .index.json of several; F32, F16, "
      "BF16)");
  add("--layer", &options->layer, "PREFIX",
      "The layer of a model: its prefix, or a part that no other layer has (h.0)");
  add("--config", &options->config, "FILE",
      "Model configuration; default: config.json next to the weights, if it exists");
  add_flag("--no-config", &options->without_config,
           "Use the options below, and no config.json next to the weights");
  group = "Without a config.json";
  add("--heads", &options->num_heads, "N", "Number of query heads")->check(whole_number());
  add_flag("--causal", &options->is_causal, "Rows do not attend to later rows");
  add_flag("--no-causal", &options->is_not_causal, "Rows also attend to later rows");
  add("--rope-base", &options->rope_base, "B",
      "Rotate queries and keys (RoPE) with this base (rope_theta)")
      ->check(CLI::PositiveNumber);
  add_flag("--no-rope", &options->without_rope, "Do not rotate queries and keys");
  group = kComputation;
  add("--weight-type", &options->weight_type, "NAME",
      "Weights of the packed layer: f32 (default), f16, bf16, int8 or int4")
      ->check(one_of(type_names, 5));
  add("--arithmetic", &options->arithmetic, "NAME",
      "Projections: f32 (default); with int8 or int4 weights also int8 or int16")
      ->check(one_of(arithmetic_names, 3));
}

}  // namespace command

int main(int argc, char **argv) {
  using namespace command;
  int status = kFailure;
  std::set_terminate(terminate);
  handle_signals();
  try {
    status = parse_and_run(argc, argv);
  } catch (const InputError &error) {
    status = complain(kBadInput, error.what());
  } catch (const std::bad_alloc &) {
    status = complain_about_memory();
  } catch (const std::exception &error) {
    status = complain(kFailure, error.what());
  }
  if (std::fflush(stdout) != 0 && status == 0) {
    status =
        complain(kBadInput, text("standard output: cannot be written: ", std::strerror(errno)));
  }
  return status;
}
