"""Collectives of the grid's axes, their statistics and the transports that exchange their data."""
