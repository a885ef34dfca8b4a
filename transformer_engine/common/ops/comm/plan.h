// Plans of overlapped products: the steps of a rank and their predicted time. Pure arithmetic; costs.cpp has the costs.
#pragma once

#include <string>
#include <vector>

#include "transformer_engine/comm.h"

namespace te::comm {

struct StepPlan {
  std::vector<te_comm_step> steps;
  te_comm_prediction prediction;
};

// Checks the problem; `op` names the caller in errors.
StepPlan make_plan(const char* op, const te_comm_problem& problem);

// Refuses costs that give no finite time; `op` names the caller in errors.
void check_costs(const char* op, const char* argument, const te_comm_costs& costs);

}  // namespace te::comm
