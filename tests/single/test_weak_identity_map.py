"""Values for objects by identity, which end with their objects."""

import tensorflow as tf

from tfdist.core.weak_identity_map import WeakIdentityMap


def test_equal_objects_have_values_of_their_own():
    one, other, known = tf.constant(1.0), tf.constant(1.0), WeakIdentityMap()
    known[one] = "one"
    assert known.get(one) == "one"
    assert one in known
    assert other not in known


def test_an_entry_ends_with_its_object_even_if_another_one_takes_its_place():
    known = WeakIdentityMap()
    for number in range(1000):  # addresses are used again
        tensor = tf.constant(1.0)
        assert known.get(tensor) is None
        known[tensor] = number
    del tensor
    assert len(known) == 0
