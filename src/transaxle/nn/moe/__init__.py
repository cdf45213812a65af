"""Mixture of experts: routing, exchange between ranks."""
