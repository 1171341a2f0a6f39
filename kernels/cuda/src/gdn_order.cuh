// In what order gdn_inputs.cu leaves the elements of a query or key: as a thread of gdn_scan.cu reads them, which has two of
// the four chains (element mod 4) of a group of D / 8. First what is of chains 0 and 1, then what is of 2 and 3.
// Constants   HEAD_SIZE = D
#pragma once

constexpr int GROUPS = 8;
constexpr int ROWS = D / GROUPS;  // of a group

DEVICE int place_in_vector(int x) {
    return x / 2 % 2 * (D / 2) + x / ROWS * (ROWS / 2) + x % ROWS / 4 * 2 + x % 2;
}
