"""The key/value store of the rendezvous: an authenticated TCP server and its clients.

tfdistrun runs the server; without tfdistrun, rank 0 does. Values are JSON. If the
connection of a rank ends before the rank has left, the server considers the rank dead.
It then sets the failure key of the generation, so that no other rank waits.
"""

from tfdist.core.rendezvous.store.client import (
    MissingKeysError,
    StoreClient,
    StoreLostError,
)
from tfdist.core.rendezvous.store.keys import (
    LEAVES,
    REQUESTS,
    SESSION,
    SLOW,
    answer_key,
    ask_step_key,
    begun_key,
    change_key,
    end_key,
    failure_key,
    is_for_launcher,
    join_key,
    leave_key,
    prefix_of_generation,
    request_key,
    step_key,
    step_of,
)
from tfdist.core.rendezvous.store.membership import Membership
from tfdist.core.rendezvous.store.server import StoreServer, StoreThread

__all__ = [
    "LEAVES",
    "REQUESTS",
    "SESSION",
    "SLOW",
    "Membership",
    "MissingKeysError",
    "StoreClient",
    "StoreLostError",
    "StoreServer",
    "StoreThread",
    "answer_key",
    "ask_step_key",
    "begun_key",
    "change_key",
    "end_key",
    "failure_key",
    "is_for_launcher",
    "join_key",
    "leave_key",
    "prefix_of_generation",
    "request_key",
    "step_key",
    "step_of",
]
