#include "transport/routes.h"

#include <algorithm>
#include <cstdlib>

namespace tfdist {

int RingDistance(int a, int b, int size) {
  const int straight = std::abs(a - b);
  return std::min(straight, size - straight);
}

std::vector<int> OverlayNeighbours(int rank, int size) {
  std::vector<int> neighbours;
  for (int jump = 1; jump < size; jump *= 2) {
    neighbours.push_back((rank + jump) % size);
    neighbours.push_back((rank - jump + size) % size);
  }
  std::sort(neighbours.begin(), neighbours.end());
  neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
  return neighbours;
}

int NextHop(int from, int to, int size, const std::vector<int>& usable) {
  int best = -1;
  int nearest = RingDistance(from, to, size);
  for (int neighbour : usable) {
    const int distance = RingDistance(neighbour, to, size);
    if (distance >= nearest) continue;
    best = neighbour;
    nearest = distance;
  }
  return best;
}

}  // namespace tfdist
