// CLI11 as the headers of the command need it. What uses it includes CLI/CLI.hpp, which takes most of the time of a file to compile.
#pragma once

namespace CLI {
class App;
class Validator;
}  // namespace CLI
