"""Tests of the containers: what real libraries write is read, what nobody should write is refused."""
