"""Placement groups that outlive what made them.

Owns the name by which a stage's placement group is found, and its removal. The one decision: whoever ends an attempt
removes its groups; Ray keeps a group until the whole job has ended, even where the actor that made it is dead, and the
next attempt would wait for what it holds.
"""

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group


def group_name(actor_name: str) -> str:
    """Name of the placement group of a gang whose controller lives in the actor of that name."""
    return f"gang of {actor_name}"


def remove_groups(actor_name: str) -> int:
    """Remove the placement groups of a gang whose controller is gone; how many there were."""
    left = [
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity)))
        for identity, group in ray.util.placement_group_table().items()
        if group["name"] == group_name(actor_name) and group["state"] != "REMOVED"
    ]
    for group in left:
        remove_placement_group(group)
    return len(left)
