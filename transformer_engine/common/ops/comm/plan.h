// A plan inside the room: the steps and what they are predicted to take. Pure arithmetic, no memory but its own; the
// costs that it is made by are costs.cpp's.
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

// Refuses costs that no time can be made of, in the name of `op`.
void check_costs(const char* op, const char* argument, const te_comm_costs& costs);

}  // namespace te::comm
