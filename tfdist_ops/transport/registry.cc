#include "transport/transport.h"

namespace tfdist {

// The table, one line per transport: the file of transport X defines XTransport().
#define TFDIST_TRANSPORTS(ROW) \
  ROW(Inproc)                  \
  ROW(Shm)                     \
  ROW(Tcp)

#define TFDIST_DECLARE(name) TransportEntry name##Transport();
TFDIST_TRANSPORTS(TFDIST_DECLARE)
#undef TFDIST_DECLARE

const std::vector<TransportEntry>& Transports() {
#define TFDIST_CALL(name) name##Transport(),
  static const std::vector<TransportEntry> table = {TFDIST_TRANSPORTS(TFDIST_CALL)};
#undef TFDIST_CALL
  return table;
}

const TransportEntry* FindTransport(const std::string& name) {
  for (const TransportEntry& entry : Transports()) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace tfdist
