"""The data plane between a control unit and the decoder: frames and the client end of the stream."""
