// Parameters and special registers.
#pragma once
#include <string>

#include "machine.h"

namespace emulate::ptx {

// ld.param of `type` to a register of this width.
Execute parameter(const std::string& type, char width);
// mov from a special register: null for other registers.
Execute special_register(const std::string& opcode, const std::string& name);

}  // namespace emulate::ptx
