#!/usr/bin/env bash
# An action chunk with curl alone: the server's metadata, then one request in JSON.
#   examples/curl.sh [http://127.0.0.1:8000]        a token: PI05_ROS_TOKEN
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
token=(-H "Authorization: Bearer ${PI05_ROS_TOKEN:-}")

curl -sS --fail-with-body "${token[@]}" "$url/v1/actions/metadata"
echo

# A stand-in for a camera: an image of one red pixel, as the base64 text of a PNG file. Of a real one:
#   base64 -w0 frame.jpg
pixel=iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGM4oKAAAAKkAQHjTKctAAAAAElFTkSuQmCC
curl -sS --fail-with-body "${token[@]}" "$url/v1/actions/generations" -H "Content-Type: application/json" --data @- <<JSON
{
  "input": {
    "prompt": "uncap the pen",
    "observation": {
      "images": {"cam_high": {"b64_json": "$pixel"}},
      "state": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    }
  },
  "parameters": {"seed": 0},
  "runtime": {"response_format": "raw"}
}
JSON
echo
