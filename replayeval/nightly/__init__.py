"""A plan run every night, compared with the nights before."""
