// A plan inside the room: the steps and what they are predicted to take. Pure arithmetic, no memory but its own.
#pragma once

#include <string>
#include <vector>

#include "transformer_engine/comm.h"

namespace te::comm {

struct Plan {
  std::vector<te_comm_step> steps;
  te_comm_prediction prediction;
};

// Checks the problem in the name of `op`.
Plan make_plan(const char* op, const te_comm_problem& problem);

}  // namespace te::comm
