// Whether AMX serves: products of bfloat16 and the attention of prompts.
#pragma once

#include <string>

namespace gapless {

// Why AMX must not serve in this process; empty when it may. Found out at the first call.
const std::string& amx_missing();

// The work of that call: asks the user and Linux, then compares small products and a small attention with the vectors.
std::string try_amx();

}  // namespace gapless
