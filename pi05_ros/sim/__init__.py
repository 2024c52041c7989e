"""ALOHA in MuJoCo, as an ordinary ROS robot. An optional extra: ``pip install 'pi05_ros[sim]'``."""
