"""This process and the others: process group, device, device mesh."""
