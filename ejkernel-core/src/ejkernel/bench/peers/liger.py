PEERS = ()
