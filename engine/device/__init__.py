"""Devices that stages run on: their kernels, memory and streams."""
