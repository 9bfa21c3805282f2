// Overlay: the links of a world in which not every rank is connected to every other one.
//
// Each rank has links to its neighbors (routes.h). Control frames to a neighbor go over its link;
// those to any other rank are relayed by the ranks between. The engine sees one Link for each peer,
// as in a full mesh (MakeLinks). Data frames are never relayed: the first one for a rank without a
// link asks for a link (Hooks::wanted), and BeginSend reports a full lane until Adopt brings it.
//
// Guarantees between two ranks that are not neighbors:
//   - Order. The source numbers its frames to each destination, which delivers them in that order
//     even if the route changes. All fragments of a message go from one source to one destination.
//     Frames between neighbors use their link as long as it lives.
//   - Nothing is lost while ranks die. The source keeps frames until their destination has
//     acknowledged them, one acknowledgement for kAckEvery frames. Once a link has ended anywhere,
//     frames may have been lost with the rank behind it: every frame is then acknowledged at once,
//     and repeated every kRepeatUs until it is. Repetitions are recognized by their numbers.
//   - No deadlock. Relaying never waits: what does not fit into the next link's lane stays in a
//     queue here. A source has at most kWindow frames under way to one destination; that, not the
//     queue, is what bounds memory.
//   - Loss. A neighbor whose link ends without a goodbye is gone. The news is flooded to all ranks:
//     each tells its neighbors once. The Pump of the lost rank's Link then fails on every rank, as
//     in a full mesh; if several are lost, first for the one lost first. A rank with its own link
//     to the lost one passes the news on, but waits for the end of that link: perhaps only a
//     connection between two living ranks was cut, and closing the links between living ranks would
//     end them all. A rank that said goodbye (Link::PeerLeaves) relays only what has no other
//     route, and its end is not announced. A frame without a route is dropped; if this happens at
//     its source, the Link to its destination fails there.
//
// Belongs to the progress thread, like the links.
#ifndef TFDIST_OPS_TRANSPORT_OVERLAY_H_
#define TFDIST_OPS_TRANSPORT_OVERLAY_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/link.h"

namespace tfdist {

// A control frame that is not in a lane.
struct Letter {
  FrameHeader header;
  std::string payload;
};

class Overlay : public std::enable_shared_from_this<Overlay> {
 public:
  struct Hooks {
    // A link to `peer` is wanted, by this rank or by the peer. Called once for each peer, on the
    // progress thread. The higher rank connects, the lower one waits for it.
    std::function<void(int peer)> wanted;
    std::function<int64_t()> now_us;  // a clock that does not go back
  };
  struct Counters {
    uint64_t relayed = 0;   // frames of other ranks, sent on
    uint64_t sent = 0;      // own frames for ranks that are not neighbors
    uint64_t repeated = 0;  // of those, sent again
    uint64_t dropped = 0;   // no route
    uint64_t adopted = 0;   // links opened later
  };

  static constexpr int kMaxSize = 1 << 16;  // ranks have 16 bits in the header
  static constexpr uint64_t kAckEvery = 16;
  static constexpr size_t kWindow = 1024;
  static constexpr int64_t kRepeatUs = 200 * 1000;

  Overlay(int rank, int size, uint32_t generation, Hooks hooks);

  // `links`: this rank's links by rank of the peer, one for each neighbor and null elsewhere.
  // Returns a Link for every rank but this one. Call it once.
  std::vector<std::unique_ptr<Link>> MakeLinks(std::vector<std::unique_ptr<Link>> links);
  // Takes over a link that was wanted.
  void Adopt(int peer, std::unique_ptr<Link> link);

  const Counters& counters() const { return counters_; }
  std::string CountersJson() const;
  size_t neighbours() const { return neighbours_.size(); }

 private:
  friend class OverlayLink;
  struct Peer {
    std::unique_ptr<Link> link;  // to a neighbor, or opened later for data
    bool neighbour = false;
    bool left = false;        // said goodbye
    bool gone = false;        // ended without one
    bool told = false;        // the news that it is gone has been passed on
    bool closed = false;      // the engine has closed its Link
    bool wanted = false;      // a link for data has been asked for
    bool ending = false;      // its link has ended; what came before is being read
    bool drained = false;     // what came before has been read
    Status error;             // why it is lost
    std::list<Letter> queue;  // neighbor: what is to go over its link
    // The numbered frames to and from a rank that is not a neighbor.
    uint64_t next_out = 0;
    std::list<Letter> unacknowledged;
    uint64_t next_in = 0;
    uint64_t acknowledged = 0;
    std::map<uint64_t, Letter> early;  // came before an earlier one
    std::list<Letter> inbox;           // for the engine
    std::list<Letter> held;            // polled, not yet released
  };

  Peer& At(int peer) { return peers_[static_cast<size_t>(peer)]; }
  // Called by OverlayLink.
  Status Pump(int peer, bool* moved);
  bool PollControl(int peer, InFrame* frame);
  void ReleaseControl(int peer, const InFrame& frame);
  void Send(int peer, FrameHeader header, std::string payload);
  void Want(int peer);
  void Leaves(int peer);
  void Close(int peer);

  void FindRoutes();
  bool Flush(int peer);
  void Queue(int neighbour, Letter letter);
  void Forward(Letter letter);
  void Receive(int neighbour, Letter letter);
  void Deliver(int source, Letter letter);
  void Accept(int source, Letter letter);
  void Acknowledge(int source);
  void HearAcknowledgement(int source, uint64_t next);
  void Lose(int peer, const Status& reason, int told_by);
  bool StillHasLink(int peer);
  void NoteLoss(int peer, const Status& reason);
  void EndedLink(int peer, const Status& reason);
  void DoubtDelivery();
  void Repeat();
  void Garbage(int neighbour, const std::string& what);

  const int rank_;
  const int size_;
  const uint32_t generation_;
  const Hooks hooks_;
  std::vector<int> neighbours_;
  std::vector<Peer> peers_;
  std::vector<int> next_hop_;  // by destination; -1: none
  // Lost ranks whose Links the engine has not closed yet, in the order of the news: a rank that
  // ends because another one died must not be taken for the culprit.
  std::list<int> losses_;
  Counters counters_;
  bool arrived_ = false;   // something for the engine, since the last Pump
  bool doubtful_ = false;  // a link has ended: frames may have been lost
  int64_t repeated_us_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_OVERLAY_H_
