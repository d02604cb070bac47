"""Rows in groups times a weight per group: the products of a mixture of experts, and its fused MLP."""
