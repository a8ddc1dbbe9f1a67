"""Mixture of experts: every token runs through a few of a layer's MLPs, which a router chooses."""
