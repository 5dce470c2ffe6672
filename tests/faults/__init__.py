"""What breaks from outside: callers are cancelled, connections are cut, servers die, disks are full."""
